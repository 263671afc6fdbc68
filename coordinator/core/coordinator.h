// Coordinator: everything the coordinator daemon decides, as a pure state
// machine. on(event, now) returns what the shell shall do, in order; the same
// events and times give the same actions. No sockets, files, clocks, threads.
//
// What it keeps true (and the simulated cluster checks):
//  * at most one generation is live: ranks of g are started only when every
//    live participant has said that no older rank of it is alive;
//  * a step enters metrics.jsonl once, in order, and only after every rank has
//    committed it;
//  * a generation begins with the newest state that is whole (inventory.h), in
//    the memory of the workers before checkpoints; a worker is sent away when
//    no generation needs what it holds any more;
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
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "coordinator/core/cause.h"
#include "coordinator/core/inventory.h"
#include "parallel/geometry/param_table.h"
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
  int64_t generation = 0;  // 0: not known
  std::string path;
  std::vector<pb::StepMetrics> recent;  // the last steps up to it, in order
};
// That wrote it; 0: not known.
int64_t generation_of(const CheckpointInfo& checkpoint);
struct CheckpointsScanned {
  std::vector<CheckpointInfo> valid;  // any order
  std::vector<std::string> invalid;   // "path: why"
  int64_t claimed = 0;                // newest generation that went on there
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
// events.jsonl and the log.
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

using Action = std::variant<Persist, SendDirective, SendFence, Respond,
                            EmitEvent, AppendMetrics, ScanCheckpoints, Exit>;

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
  // Also from there: the first step of each generation in it.
  std::vector<FirstStep> first_steps;
  // From the journal, when this is not the first life on the run directory.
  std::optional<pb::Durable> restored;
  // `remesh run --resume` of an ended or stopped job: go on from the newest
  // checkpoint instead of reporting the end again.
  bool resume = false;
  // Smallest epoch of this life (unix milliseconds), so that workers follow it
  // even when the journal was lost.
  uint64_t epoch_floor = 0;
  // Seconds of unix time at monotonic zero, for the times in events.
  double unix_offset_s = 0;
};

// Time that workers have to find a restarted coordinator.
inline constexpr int64_t kReconnectSlackMs = 3000;

// Where a generation's state comes from, in words.
std::string source_text(const pb::Source& source);

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
    int64_t lost_ms = -1;  // connection broke, not heard since
    bool alive = true;
    bool draining = false;
    bool sent_away = false;  // was told to leave
    bool reported = false;   // in this life of the coordinator
    std::string death;       // why it is not alive
    int64_t directive_ms = -1;
    std::string directive_key;  // what the last one said, to spot a change
    std::map<int, Progress> progress;  // by rank
    bool leaving() const { return draining || report.leaving(); }
  };
  // Why a generation ended out of order.
  struct Cause {
    std::string text;
    int rank = -1;
    std::string worker;
    int64_t step = -1;  // being computed
    double exit_time = 0;
    bool by_signal = false;  // died_of_itself()
    int exit_code = 0;
    bool failure = true;  // false: a change of plan before anything ran
  };

  void handle(const Tick&) {}
  void handle(const ReportReceived& e);
  void handle(const FenceReceived& e);
  void handle(const PeerLost& e);
  void handle(const CommandReceived& e);
  void handle(const CheckpointsScanned& e);

  void skip_to(const pb::Report& r);
  // Level-triggered part, run after every event.
  void reconcile();
  void notice_own_absence(int64_t now_ms);
  void expire_members();
  void reconcile_waiting();
  void reconcile_preparing();
  void reconcile_live();  // running and finishing
  void reconcile_aborting();
  void reconcile_ended();
  void send_directives();
  pb::Directive directive_for(const std::string& name, const Member& m) const;

  // Members.
  bool participates(const std::string& name, uint64_t incarnation) const;
  bool has_ranks(const std::string& name) const;
  const Member* live_participant(const std::string& name) const;
  bool quiesced(const Member& m) const;
  bool all_quiesced() const;
  bool everybody_heard() const;
  bool all_started() const;
  void worker_gone(const std::string& name, const Member& m,
                   const std::string& why);

  // Meshes.
  // By the job's keys. everybody: also who leaves, however many were asked for.
  planner::DealRequest request(bool everybody = false) const;
  Result<planner::Deal> deal() const;  // by the layout asked for, if it fits
  Result<planner::Deal> deal(const planner::DealRequest& request) const;
  std::optional<geometry::Layout> pinned() const;
  std::optional<pb::Mesh> mesh_before() const;
  Status ask_mesh(const std::string& layout);
  Status ask_scale(int64_t slots);
  Status check_scale(int64_t slots) const;
  // Gives the layout asked for up when `chosen` is another; says which.
  std::string release_pin(const geometry::Layout& chosen);
  void emit_released(const std::string& layout);
  void release_unfit_pin();
  void release_scale(const std::string& why);

  // Planning.
  bool wants_other_mesh(std::string* why, bool* must) const;
  void plan(const CheckpointsScanned& scan);
  void add_ranks(const planner::Deal& deal, pb::Assignment* a) const;
  void add_participant(const std::string& name, const Member& m,
                       pb::Assignment* a);
  bool choose_source(const CheckpointsScanned& scan, pb::Source* source);
  std::string no_checkpoint(const CheckpointsScanned& scan) const;
  bool refuses(const std::string& checkpoint) const;
  void take_recent(const CheckpointsScanned& scan);
  const pb::StepMetrics* known_metrics(int64_t generation, int64_t step) const;
  void fill_metrics(int64_t generation, int64_t up_to);

  // States in memory (states.cc).
  bool keeps_state() const { return table_.has_value(); }
  bool inventory_known(const Member& m) const;
  bool inventories_known() const;
  bool saved_at_end(const CheckpointsScanned& scan);
  bool source_from_states(const CheckpointsScanned& scan, planner::Deal* deal,
                          pb::Source* source);
  std::set<std::string> hosts_of(const planner::Deal& deal) const;
  // hosts: where there will be processes; none: everywhere.
  Choice choose(const CheckpointsScanned& scan,
                const std::set<std::string>& hosts,
                std::vector<pb::StateHolding>* messages) const;
  bool rescue(const CheckpointsScanned& scan, planner::Deal* deal,
              Choice* choice, std::vector<pb::StateHolding>* messages) const;
  std::optional<planner::Deal> deal_as_before() const;
  std::optional<planner::Deal> deal_on(const std::set<std::string>& hosts,
                                       int less) const;
  std::set<std::string> hosts_needed(const CheckpointsScanned& scan,
                                     int64_t step) const;
  int64_t last_known_step(int64_t generation) const;
  void refuse_source();
  bool source_is_there() const;
  std::string lost_source() const;
  std::set<std::string> gone_holders() const;
  int64_t rejoin_until_ms() const;
  bool awaits_rejoin() const;
  bool begin_rejoin_wait();
  void watch_hand_over();
  bool needs_memory_of(const std::string& name, const Member& m) const;
  bool must_save_to_finish() const;
  bool stop_needs_save() const;
  bool expects_plan() const;
  bool drains(const std::string& name, uint64_t incarnation) const;

  // Ends of generations.
  std::vector<RankView> rank_views() const;  // of the generation
  std::optional<Cause> find_exit() const;
  std::optional<Cause> find_loss() const;
  std::optional<Cause> find_hang() const;
  Cause settled_cause() const;
  int64_t hang_after_ms() const;
  int64_t silent_ms() const;  // without a report: its ranks are not known
  void begin_abort(const Cause& cause);
  void end_generation();
  void account_failure();
  void terminate(pb::Durable::Phase phase, const std::string& why);
  void finish_with(const std::string& reason, bool must);

  // Steps.
  void take_metrics();
  std::optional<uint64_t> restored_digest() const;
  void append_metrics(const pb::StepMetrics& m);
  void watch_checkpoints();
  int64_t min_committed() const;
  int64_t total_steps() const { return options_.job.train().steps(); }
  bool job_finished() const { return last_finished_ >= total_steps(); }

  void set_phase(pb::Durable::Phase phase);  // persists
  void persist() { act(Persist{durable_}); }
  pb::EventRecord event(const std::string& name) const;
  void emit(pb::EventRecord record);
  pb::Reply answer(const pb::Command& command);
  void note_drain(const std::string& name, const Member& m);
  void fill_worker_status(const std::string& name, const Member& m,
                          pb::WorkerStatus* out) const;
  void fill_prediction(pb::RankStatus* rank) const;
  void fill_settings(pb::JobStatus* out) const;

  template <typename A>
  void act(A action) {
    actions_.push_back(std::move(action));
  }

  Options options_;
  const std::optional<planner::JobShape> shape_;
  // Of the model whose states are kept in memory; none: they are not kept.
  std::optional<geometry::ParamTable> table_;
  int64_t now_ms_ = 0;
  std::vector<Action> actions_;
  pb::Durable durable_;
  // The answers to the last requests: they are asked again at every event.
  mutable std::vector<std::pair<planner::DealRequest, Result<planner::Deal>>>
      dealt_;
  // Predicted for the ranks of a generation, when somebody asks.
  mutable int64_t predicted_generation_ = -1;
  mutable std::map<int, pb::MemoryUse> predicted_;
  std::map<std::string, Member> members_;
  // Newest incarnation and seq heard of each name, also of those given up.
  std::map<std::string, std::pair<uint64_t, uint64_t>> heard_;
  // Relay of fences of the current generation: index -> worker -> blob.
  std::map<int64_t, std::map<std::string, std::string>> fences_;

  // One row for all workers: one that was given up and comes back has heard
  // the numbers before.
  uint64_t directive_seq_ = 0;
  int64_t adopted_generation_ = -1;  // begun in an earlier life
  int64_t started_ms_ = 0;
  int64_t phase_since_ms_ = 0;
  bool scanning_ = false;
  bool finish_checked_ = false;
  bool gathering_ = true;  // the join window applies to the next plan
  int64_t last_join_ms_ = 0;
  int64_t not_before_ms_ = 0;  // back-off after repeated failures
  std::string waiting_for_;
  std::optional<Cause> cause_;     // of the abort under way
  int64_t change_began_ms_ = -1;   // training stands since
  int64_t loss_ms_ = 0;            // a worker that held a state was lost then
  std::set<std::string> awaited_;  // those, since steps would be lost
  bool handed_over_ = false;  // nobody needs the states this one began with
  std::vector<FirstStep> first_steps_;
  int64_t lost_steps_ = 0;          // by the change under way
  int64_t refused_until_ms_ = 0;    // optional stops are off: saving fails
  std::map<int, int64_t> refused_;  // stops refused so far, by rank
  int64_t last_finished_ = 0;
  std::optional<pb::StepMetrics> last_metrics_;
  // Not in the record yet, by the generation that made the step, and step: what
  // workers told, also of earlier generations (one that was silent may come
  // back with newer steps than the record has, and their state), and what the
  // checkpoints say that were scanned last.
  std::map<int64_t, std::map<int64_t, pb::StepMetrics>> told_, proven_;
  std::deque<double> step_times_;
  int64_t steps_in_generation_ = 0;
  int64_t checkpoint_step_ = -1;
  int64_t checkpoint_request_ = 0;
  std::string checkpoint_error_;
  std::map<int, std::string> checkpoint_errors_;  // told of, by rank
  std::deque<pb::EventRecord> events_;
  uint64_t dropped_ = 0;
  int64_t terminal_since_ms_ = -1;
  bool exited_ = false;
};

}  // namespace remesh::core
