// The interface of the coordinator core as data: its inputs, its actions and
// its options. coordinator.h says what the core does with them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "proto/control.pb.h"

namespace remesh::core {

// ------------------------------------------------------------------ inputs

struct Tick {};
struct ReportReceived {
  pb::Report report;
};
struct FenceReceived {
  pb::FenceIn fence;
};
// The transport saw the worker's connection break; it may come back.
struct PeerLost {
  std::string worker;
};
struct CommandReceived {
  uint64_t client = 0;  // the shell's token, returned in Respond
  pb::Command command;
};

// A committed checkpoint whose manifest verified.
struct CheckpointInfo {
  int64_t step = 0;
  int64_t generation = 0;  // that wrote it; 0 if unknown
  std::string path;
  // Metrics of the last steps up to and including `step`, in order.
  std::vector<pb::StepMetrics> recent;
};
// The generation that wrote the checkpoint, if necessary by its metrics; 0 if
// unknown.
int64_t generation_of(const CheckpointInfo& checkpoint);

// The answer to ScanCheckpoints.
struct CheckpointsScanned {
  std::vector<CheckpointInfo> valid;  // in any order
  std::vector<std::string> invalid;   // "path: why"
  int64_t claimed = 0;  // newest generation that claimed the folder
};

using Input = std::variant<Tick, ReportReceived, FenceReceived, PeerLost,
                           CommandReceived, CheckpointsScanned>;

// ----------------------------------------------------------------- actions

// Write to the journal, durably, before executing any later action.
struct Persist {
  pb::Durable durable;
};
// Send to directive.worker().
struct SendDirective {
  pb::Directive directive;
};
struct SendFence {
  std::string worker;
  pb::FenceOut fence;
};
struct Respond {
  uint64_t client = 0;
  pb::Reply reply;
};
// Append to events.jsonl and to the log.
struct EmitEvent {
  pb::EventRecord record;
};
// Append to metrics.jsonl, durably enough that a restarted coordinator finds
// it.
struct AppendMetrics {
  pb::StepMetrics metrics;
};
// List and verify the checkpoints, then answer with CheckpointsScanned.
struct ScanCheckpoints {};
// The job has ended and the workers know it: exit with this code.
struct Exit {
  int code = 0;
  std::string message;
};

using Action = std::variant<Persist, SendDirective, SendFence, Respond,
                            EmitEvent, AppendMetrics, ScanCheckpoints, Exit>;

// ----------------------------------------------------------------- options

// The first step that a generation finished, that is, whose metrics entered
// the metrics log. If the generation restored the step from a state of an older
// one, `after` is that older one, which has the same step; otherwise 0.
struct FirstStep {
  int64_t generation = 0;
  int64_t step = 0;
  int64_t after = 0;
};

struct Options {
  pb::Job job;          // resolved
  std::string run_dir;  // absolute
  std::string host;     // for status
  int pid = 0;
  std::string address;  // where workers connect
  // From metrics.jsonl: the last finished step, 0 if there is none, and the
  // first step of each generation.
  int64_t last_finished_step = 0;
  std::optional<pb::StepMetrics> last_metrics;
  std::vector<FirstStep> first_steps;
  // From the journal, unless this is the first coordinator of the run
  // directory.
  std::optional<pb::Durable> restored;
  // Continue an ended or stopped job from its newest state instead of
  // reporting its end again.
  bool resume = false;
  // Lower bound of this coordinator's epoch (unix milliseconds), so that
  // workers follow it even when the journal was lost.
  uint64_t epoch_floor = 0;
  // Unix time in seconds at monotonic zero, for the times in events.
  double unix_offset_s = 0;
};

}  // namespace remesh::core
