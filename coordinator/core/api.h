// The interface of the coordinator core as data: its inputs, its actions and
// its options. coordinator.h says what the core does with them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "parallel/planner/placement.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"
#include "proto/wire/protocol.h"

namespace remesh::core {

// ------------------------------------------------------------------ inputs

struct Tick {
  // How long, since the last tick, actions were held back because an earlier
  // write was not done. What waits for their effect is not late.
  int64_t unwritten_ms = 0;
  // How long the storage did not answer at all. Workers and ranks that use the
  // same storage cannot do anything, either.
  int64_t stalled_ms = 0;
  // So much waits to be written that the workers should keep further metrics.
  bool backlog_full = false;
  // The metrics of the steps up to this one survive a crash of the host.
  int64_t synced_step = 0;
};
// From a worker.
struct MessageReceived {
  pb::Envelope message;
  std::string key;  // that its sender proved to have; "": without keys
};
// The right of a key to a worker name that another key registered.
enum class Claim {
  kNone,
  kWhenDead,  // once that worker is dead
  kNow,
};
// The transport saw the worker's connection break; it may come back.
struct PeerLost {
  std::string worker;
  std::string revoked;  // why it will not be heard again; "": it may come back
};
struct CommandReceived {
  uint64_t client = 0;  // the shell's token, returned in Respond
  pb::Command command;
};

// A committed checkpoint whose manifest verified.
struct CheckpointInfo {
  int64_t step = 0;
  // The generation that wrote the checkpoint; 0: it was imported.
  int64_t generation = 0;
  std::string path;
  // Metrics of the last steps up to and including `step`, in order.
  std::vector<pb::StepMetrics> recent;
};

// A checkpoint that cannot be used.
struct InvalidCheckpoint {
  int64_t step = 0;
  std::string path;
  Code code = Code::kCorrupt;
  std::string why;  // for people; names the checkpoint or a file in it

  // The storage returns an error, so that this may pass. A missing file is
  // damage.
  bool is_unreadable() const {
    return code != Code::kNotFound && remesh::is_unreadable(code);
  }
};

// The answer to ScanCheckpoints.
struct CheckpointsScanned {
  std::vector<CheckpointInfo> valid;  // in any order
  std::vector<InvalidCheckpoint> invalid;
  int64_t claimed = 0;  // newest generation that claimed the folder
};

using Input = std::variant<Tick, MessageReceived, PeerLost, CommandReceived,
                           CheckpointsScanned>;

// Whether it asks and changes nothing.
inline bool is_question(const Input& input) {
  const auto* c = std::get_if<CommandReceived>(&input);
  return c != nullptr && c->command.kind() == pb::Command::STATUS;
}

// ----------------------------------------------------------------- actions

// Write to the journal, durably, before executing any later action but fences,
// which belong to a generation that is written, and the answer to STATUS.
struct Persist {
  pb::Durable durable;
};
// Send with_assignment() to directive.worker().
struct SendDirective {
  // Without its assignment, which is large, and without its number, which it
  // gets when it is sent, each time.
  pb::Directive directive;
  // That of a generation is shared by the directives of all workers.
  std::shared_ptr<const pb::Assignment> assignment;  // with PREPARE

  pb::Directive with_assignment() const {
    pb::Directive out = directive;
    if (assignment) *out.mutable_assignment() = *assignment;
    return out;
  }
};
struct SendFence {
  std::string worker;
  pb::FenceOut fence;
};
struct Respond {
  uint64_t client = 0;
  pb::Reply reply;
};
// The answer to whoever sent the message that has just been given to on().
struct Refuse {
  pb::Refusal refusal;
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
// List and verify the checkpoints, then answer with CheckpointsScanned. The one
// of saved_step (0: none) was committed: look it up by name if it is not
// listed, because a listing may come from a cache of the file system.
struct ScanCheckpoints {
  int64_t saved_step = 0;
};
// The job has ended and the workers know it: exit with this code.
struct Exit {
  int code = 0;
  std::string message;
};

using Action = std::variant<Persist, SendDirective, SendFence, Respond, Refuse,
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
  std::string data_id;  // of the job's data set; "": it is not on this host
  // From metrics.jsonl: the last finished step, 0 if there is none, the newest
  // lines, and the first step of each generation.
  int64_t last_finished_step = 0;
  std::vector<pb::StepMetrics> recent_metrics;
  std::vector<FirstStep> first_steps;
  int64_t damaged_lines = 0;        // that are no metrics
  int64_t recorded_generation = 0;  // newest in metrics.jsonl, events.jsonl
  // From the journal, unless this is the first coordinator of the run
  // directory.
  std::optional<pb::Durable> restored;
  // Continue an ended or stopped job from its newest state instead of
  // reporting its end again.
  bool resume = false;
  bool no_auth = false;  // for status
  // Lower bound of this coordinator's epoch (unix milliseconds), so that
  // workers follow it even when the journal was lost.
  uint64_t epoch_floor = 0;
  // Unix time in seconds at monotonic zero, for the times in events.
  double unix_offset_s = 0;
  wire::ProtocolRange protocol;
  uint64_t run_id = 0;  // of a run that has none in its journal
  // A core of the workers' hosts, for the choice of a mesh.
  planner::Machine core = planner::reference_core();
  // The run's secret, for Directive.proof: the same in every life of the
  // coordinator, also when the journal is lost.
  std::string secret;
};

// Directive.proof of a coordinator with that Options::secret.
uint64_t proof_of(const std::string& secret, uint64_t epoch,
                  int64_t generation);

}  // namespace remesh::core
