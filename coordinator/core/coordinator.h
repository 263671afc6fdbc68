// Coordinator: everything the coordinator daemon decides, as a pure state
// machine. on(event, now) returns what the shell shall do, in order; the same
// events and times give the same actions. No sockets, files, clocks, threads.
//
// What it keeps true (and the simulated cluster checks):
//  * at most one generation is live: ranks of g are started only when every
//    live participant has said that no older rank of it is alive;
//  * a step enters metrics.jsonl once, in order, and only after every rank has
//    committed it;
//  * what it must not forget is in a Persist action before the actions that
//    act on it;
//  * when faults stop, the job goes on and ends.
//
// Shell's part: execute actions in order; deliver every message at most once
// to on(); call on(Tick) at least every 50 ms; answer ScanCheckpoints with
// CheckpointsScanned.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "parallel/planner/deal.h"
#include "proto/control.pb.h"

namespace remesh::core {

// ------------------------------------------------------------------ events

struct ReportReceived {
  pb::Report report;
};
struct FenceReceived {
  pb::FenceIn fence;
};
// The transport saw the worker's connection break (it may come back).
struct PeerLost {
  std::string worker;
};
struct CommandReceived {
  uint64_t client = 0;  // the shell's token, given back in Respond
  pb::Command command;
};
// A committed checkpoint whose manifest verified.
struct CheckpointInfo {
  int64_t step = 0;
  std::string path;
  std::vector<pb::StepMetrics> recent;
};
struct CheckpointsScanned {
  std::vector<CheckpointInfo> valid;  // any order
  std::vector<std::string> invalid;   // "path: why"
};
struct Tick {};

using Event = std::variant<Tick, ReportReceived, FenceReceived, PeerLost,
                           CommandReceived, CheckpointsScanned>;

// ----------------------------------------------------------------- actions

// Journal, durable before any later action.
struct Persist {
  pb::Durable durable;
};
struct SendDirective {
  pb::Directive directive;  // to directive.worker()
};
struct SendFence {
  std::string worker;
  pb::FenceOut fence;
};
struct Respond {
  uint64_t client = 0;
  pb::Reply reply;
};
// events.jsonl and the log; the shell fills in the time.
struct EmitEvent {
  pb::EventRecord record;
};
// metrics.jsonl, durable enough to be found by a restarted coordinator.
struct AppendMetrics {
  pb::StepMetrics metrics;
};
struct ScanCheckpoints {};
// The job has ended and the workers were told: leave with this exit code.
struct Exit {
  int code = 0;
  std::string message;
};

using Action =
    std::variant<Persist, SendDirective, SendFence, Respond, EmitEvent,
                 AppendMetrics, ScanCheckpoints, Exit>;

// ------------------------------------------------------------------- core

struct Options {
  pb::Job job;          // resolved
  std::string run_dir;  // absolute
  std::string host;     // for status
  int pid = 0;
  std::string address;  // where workers connect
  // From metrics.jsonl: the last step in it, 0 when there is none.
  int64_t last_finished_step = 0;
  std::optional<pb::StepMetrics> last_metrics;
  // From the journal, when this is not the first life on the run directory.
  std::optional<pb::Durable> restored;
  // `remesh run --resume` of an ended or stopped job: go on from the newest
  // checkpoint instead of reporting the end again.
  bool resume = false;
};

class Coordinator {
 public:
  // now_ms: monotonic, milliseconds. The first actions come from start().
  explicit Coordinator(Options options);
  std::vector<Action> start(int64_t now_ms);
  std::vector<Action> on(const Event& event, int64_t now_ms);

  // For status and tests.
  pb::JobStatus status(int64_t now_ms) const;
  bool ended() const { return exited_; }
  const pb::Durable& durable() const { return durable_; }
  // Members not given up at this moment, with the generation they are in.
  bool considers_live(const std::string& worker, uint64_t incarnation) const;

 private:
  struct Progress {
    uint64_t value = 0;
    int64_t since_ms = 0;
  };
  struct Member {
    pb::Report report;  // newest
    int64_t heard_ms = 0;
    int64_t joined_ms = 0;
    int64_t lost_ms = -1;  // connection broke, not heard since
    bool alive = true;
    bool draining = false;
    bool reported = false;  // in this life of the coordinator
    uint64_t directive_seq = 0;
    int64_t directive_ms = -1;
    std::string directive_key;  // what the last one said, to spot a change
    std::map<int, Progress> progress;
  };
  struct Cause {
    std::string text;
    int rank = -1;
    std::string worker;
    double exit_time = 0;
    bool fatal = false;       // stop the job
    bool bad_source = false;  // the checkpoint does not load
    int64_t step = -1;
  };

  // Event handlers.
  void handle(const Tick&) {}
  void handle(const ReportReceived& e);
  void handle(const FenceReceived& e);
  void handle(const PeerLost& e);
  void handle(const CommandReceived& e);
  void handle(const CheckpointsScanned& e);

  // Level-triggered part, run after every event.
  void reconcile();
  void expire_members();
  void reconcile_waiting();
  void reconcile_preparing();
  void reconcile_live();  // running and finishing
  void reconcile_aborting();
  void send_directives();
  pb::Directive directive_for(const std::string& name, const Member& m) const;

  // Pieces of the decisions.
  Result<planner::Deal> deal() const;
  bool wants_other_mesh(std::string* why, bool* must) const;
  void plan(const CheckpointsScanned& scan);
  void choose_source(const CheckpointsScanned& scan, pb::Source* source);
  void fill_metrics(const std::vector<pb::StepMetrics>& recent,
                    int64_t up_to);
  bool find_failure(Cause* cause) const;
  bool find_hang(Cause* cause) const;
  void begin_abort(const Cause& cause);
  void note_better_cause();
  void end_generation(bool in_order);
  void account_failure(const Cause& cause);
  void take_metrics();
  bool job_finished() const;
  void terminate(pb::Durable::Phase phase, const std::string& why);
  void finish_with(const std::string& reason, bool must);
  bool participant(const std::string& name) const;
  bool all_quiesced() const;
  int64_t min_committed() const;
  int64_t hang_after_ms() const;
  void set_phase(pb::Durable::Phase phase);
  void persist();
  void emit(pb::EventRecord record);
  pb::EventRecord event(const std::string& name) const;
  pb::Reply answer(const pb::Command& command);

  template <typename A>
  void act(A action) {
    actions_.push_back(std::move(action));
  }

  Options options_;
  int64_t now_ms_ = 0;
  std::vector<Action> actions_;
  pb::Durable durable_;
  std::map<std::string, Member> members_;
  std::map<std::string, pb::Durable::Member> participants_;
  // Relay of fences of the current generation: index -> worker -> blob.
  std::map<int64_t, std::map<std::string, std::string>> fences_;

  bool scanning_ = false;
  int64_t scan_sent_ms_ = 0;
  bool waited_for_slots_ = true;  // the join window applies
  int64_t last_join_ms_ = 0;
  int64_t not_before_ms_ = 0;  // back-off after repeated failures
  int64_t phase_since_ms_ = 0;
  int64_t started_ms_ = 0;
  std::string waiting_for_;
  std::optional<Cause> cause_;
  int64_t failure_noticed_ms_ = -1;
  int64_t change_began_ms_ = -1;  // training stands since
  int64_t step_at_change_ = 0;
  bool refused_join_ = false;  // saving failed: optional stops are off
  int64_t refused_base_ = 0;
  int64_t refused_until_ms_ = 0;
  int64_t last_finished_ = 0;
  std::optional<pb::StepMetrics> last_metrics_;
  std::map<int64_t, pb::StepMetrics> pending_metrics_;
  std::deque<double> step_times_;
  int64_t steps_in_generation_ = 0;
  int64_t checkpoint_step_ = 0;
  int64_t checkpoint_request_ = 0;
  std::string checkpoint_error_;
  std::deque<pb::EventRecord> events_;
  uint64_t dropped_ = 0;
  int64_t terminal_since_ms_ = -1;
  bool exited_ = false;
};

}  // namespace remesh::core
