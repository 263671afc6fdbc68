// The traces of a generation's ranks as one timeline, and what they say: pure
// functions of the files' texts.
//
// A rank's file is worker/trace's: Chrome trace JSON whose "X" events have
// whole microseconds of unix time, pid = rank, lane (tid) 0 = the training
// thread. Categories: step, forward, backward, weight, collective, wait,
// bubble, optimizer, checkpoint, data.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/geometry/schedule.h"
#include "proto/base/status.h"

namespace remesh::ctl {

struct TraceSpan {
  int tid = 0;
  int64_t begin_us = 0, end_us = 0;
  std::string category, name;
  int64_t step = -1, microbatch = -1;  // where the span has them
  int64_t length_us() const { return end_us - begin_us; }
};

struct RankTrace {
  int rank = 0;
  int64_t generation = 0;
  std::string mesh, schedule;
  int chunks = 1;
  int64_t microbatches = 0;
  int64_t dropped = 0;              // spans that did not fit into its memory
  std::vector<TraceSpan> spans;     // outer ones first
  std::vector<std::string> events;  // of traceEvents, each as JSON
};

// Fails (corrupt), naming the file and what is wrong: not JSON, an event
// without what it needs, a negative length, spans of one lane that overlap.
Result<RankTrace> parse_trace(std::string_view text, const std::string& name);

// One Chrome trace of all; times count from the first span. Spans of less than
// a microsecond are left out.
std::string merge_traces(const std::vector<RankTrace>& ranks);

struct RankShares {
  int rank = 0;
  double step_s = 0;  // traced steps, together
  double exposed_s = 0, bubble_s = 0;
  double compute_s() const { return step_s - exposed_s - bubble_s; }
};
// Of the traced steps. Time in collectives and waits on lane 0 is exposed.
RankShares shares_of(const RankTrace& trace);

// The pipeline's idle share, as simulate() (schedule.h) defines it: from the
// first pass of a step to its last on any of its ranks.
struct PipelineBubble {
  double measured = 0;   // mean over steps and pipelines
  double scheduled = 0;  // by the schedule, with the mean times of the passes
  double uneven = 0;     // the same with each pipeline rank's own mean times
  // The same with the time that each pass took: what the measured share has
  // beyond it are messages, not passes of unsteady length (a shared machine).
  double replayed = 0;
  geometry::PassCosts costs;  // seconds
  int steps = 0;              // 0: nothing to measure
};
// Fails when mesh or schedule of the traces cannot be read or differ.
Result<PipelineBubble> pipeline_bubble(const std::vector<RankTrace>& ranks);

// For people: a table of the ranks' shares, and the bubble.
std::string trace_report(const std::vector<RankTrace>& ranks);

}  // namespace remesh::ctl
