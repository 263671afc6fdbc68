// Merges the traces of a generation's ranks into one timeline and analyzes
// them: pure functions of the contents of the files.
//
// A rank's file is written by worker/trace: Chrome trace JSON whose "X" events
// have integer microseconds of unix time, pid = rank, lane (tid) 0 = the
// training thread. Categories: step, forward, backward, weight, collective,
// wait, bubble, optimizer, checkpoint, data.
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
  int64_t step = -1, microbatch = -1;  // -1: not given
  int64_t length_us() const { return end_us - begin_us; }
};

struct RankTrace {
  int rank = 0;
  int64_t generation = 0;
  std::string mesh, schedule;
  int chunks = 1;
  int64_t microbatches = 0;
  int64_t dropped = 0;              // spans that did not fit into the buffer
  std::vector<TraceSpan> spans;     // outer ones first
  std::vector<std::string> events;  // of traceEvents, each as JSON
};

// Corrupt, naming the file and the problem, if it is not JSON, an event lacks a
// field or has a negative length, or spans of one lane overlap.
Result<RankTrace> parse_trace(std::string_view text, const std::string& name);

// One Chrome trace of all ranks; times count from the first span. Spans shorter
// than a microsecond are omitted.
std::string merge_traces(const std::vector<RankTrace>& ranks);

struct RankShares {
  int rank = 0;
  double step_s = 0;  // sum over the traced steps
  double exposed_s = 0, bubble_s = 0;
  double compute_s() const { return step_s - exposed_s - bubble_s; }
};
// Time in collectives and waits on lane 0 is exposed communication.
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

// A table of the ranks' shares, and the bubble, as text.
std::string trace_report(const std::vector<RankTrace>& ranks);

}  // namespace remesh::ctl
