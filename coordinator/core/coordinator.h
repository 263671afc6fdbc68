// Coordinator: everything the coordinator daemon decides, as a pure state
// machine. on(input, now) returns the actions that the shell executes in order;
// the same inputs and times give the same actions. No sockets, files, clocks or
// threads.
//
// The class is a reconciler: after every input it compares what should be with
// what the workers report and moves the generation through its phases. What it
// knows and how it judges is in values with headers and tests of their own:
//
//   admission.h         what of a worker's message counts
//   name_owners.h       which key may use which worker name
//   roster.h            who is a member; where a worker is declared dead
//   step_ledger.h       which steps are finished, and their metrics
//   step_times.h        how long steps and changes of mesh take
//   checkpoint_watch.h  which checkpoints were saved or failed
//   failure_detector.h  whether the generation failed (cause.h: the culprit)
//   failure_budget.h    whether to try again, and when
//   cordoning.h         which hosts get no ranks for a while (cordons.h), and
//                       which of many links is bad (link_search.h)
//   mesh_policy.h       which mesh the job should have
//   stop_pause.h        when ranks that could not stop are asked again
//   room.h              whether the states fit into shared memory
//   gathering.h         when to look for a state to continue from
//   recovery.h          which state a generation starts from (state_choice.h)
//   assignment.h        the plan of a generation
//   directives.h        what each worker is asked to do
//   state_retention.h   whose memory is still needed (survival.h)
//   fence_relay.h       PMIx fences
//   announcements.h     what people are told when something happens
//   job_status.h        what people are told when they ask
//   commands.h          what operators ask for
//
// The values return what changed or what they decided; only this class
// persists, sends and emits.
//
// Invariants, which the simulated cluster (tests/sim) checks:
//  * at most one generation is live: ranks of generation g start only when
//    every live participant has reported that no older rank of it is alive;
//  * a step enters metrics.jsonl once, in order, and only after every rank has
//    committed it;
//  * a generation starts from the newest complete state (recovery.h), and a
//    worker is sent away only when no generation needs its memory any more;
//  * whatever must survive a crash is in a Persist action before the actions
//    that depend on it;
//  * when faults cease, the job continues and ends.
//
// The shell executes actions in order, delivers every message at most once (to
// on() or take()), calls on(Tick) at least every 50 ms, and answers
// ScanCheckpoints with CheckpointsScanned.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/core/admission.h"
#include "coordinator/core/announcements.h"
#include "coordinator/core/api.h"
#include "coordinator/core/assignment.h"
#include "coordinator/core/checkpoint_watch.h"
#include "coordinator/core/cluster_view.h"
#include "coordinator/core/commands.h"
#include "coordinator/core/cordoning.h"
#include "coordinator/core/directives.h"
#include "coordinator/core/failure_budget.h"
#include "coordinator/core/failure_detector.h"
#include "coordinator/core/fence_relay.h"
#include "coordinator/core/gathering.h"
#include "coordinator/core/job_status.h"
#include "coordinator/core/mesh_policy.h"
#include "coordinator/core/name_owners.h"
#include "coordinator/core/recovery.h"
#include "coordinator/core/room.h"
#include "coordinator/core/roster.h"
#include "coordinator/core/state_retention.h"
#include "coordinator/core/step_ledger.h"
#include "coordinator/core/step_times.h"
#include "coordinator/core/stop_pause.h"
#include "parallel/planner/shape.h"
#include "proto/rundir/events.h"

namespace remesh::core {

class Coordinator {
 public:
  explicit Coordinator(Options options);
  // now_ms: monotonic, milliseconds. The first actions come from start().
  std::vector<Action> start(int64_t now_ms);
  std::vector<Action> on(const Input& input, int64_t now_ms);
  // For messages of workers, of which a large job sends thousands a second, for
  // connections, which may all end at once, and for questions. What they mean
  // for the job as a whole is decided in settle() for all of them, or before
  // the next other input.
  std::vector<Action> take(const Input& input, int64_t now_ms);
  std::vector<Action> settle(int64_t now_ms);

  // For status and tests.
  pb::JobStatus status() const;
  bool ended() const { return exited_; }
  const pb::Durable& durable() const { return durable_; }
  const Roster& roster() const { return roster_; }
  const NameOwners& owners() const { return owners_; }

 private:
  void hear(const Input& input, int64_t now_ms);
  void handle(const Tick& e);
  void handle(const MessageReceived& e);
  void handle(const PeerLost& e) {
    roster_.on_disconnect(e.worker, now_ms_, e.revoked);
  }
  void handle(const CommandReceived& e);
  void handle(const CheckpointsScanned& e);
  void take_report(const pb::Report& r, const std::string& key);
  void take_fence(const pb::FenceIn& f);
  void advance_to(int64_t now_ms);
  void skip_to_generation_of(const pb::Report& report);

  // One method for each phase, run after every input, or after those taken.
  void reconcile();
  void reconcile_waiting();
  void reconcile_preparing();
  void reconcile_live();  // RUNNING and FINISHING
  void reconcile_ended();
  bool put_off(const MeshPolicy::MeshChange& change);

  // Starting a generation (generation.cc).
  void plan(const CheckpointsScanned& scan);
  void restore_steps(int64_t generation, int64_t step, int64_t next);
  void wait_for_room(const Plan& plan);
  void begin_generation(const Recovery::Decision& decision, Plan plan,
                        const std::vector<CheckpointInfo>& checkpoints);
  void wait_for(Gathering::Wait what) {
    emit(event_of(what));
    gathering_.wait_for(std::move(what));
  }

  // Ending a generation and the job (generation.cc).
  void finish(const MeshPolicy::MeshChange& change);
  void abort(const pb::Cause& failure);
  void call_off(const std::string& why) {  // the same without a fault
    abort(change_of_plan(why));
  }
  void end_generation();
  void wait_to_save();
  void end_finished_job(const std::string& where);
  void terminate(pb::Durable::Phase phase, const std::string& why);

  Cordoning cordoning();
  // Persists and announces what changes, and returns what `decide` returns.
  bool cordon(const std::function<bool(Cordoning&)>& decide);

  // Members and steps.
  void announce(const Roster::Changes& changes);
  void finish_steps(int64_t committed);
  void record(const StepLedger::Entry& entry);

  ClusterView view() const {
    return {.roster = roster_,
            .durable = durable_,
            .now_ms = now_ms_,
            .phase_since_ms = phase_since_ms_,
            .times = &times_,
            .last_finished = ledger_.last_finished(),
            .saved_step = checkpoints_.newest_step(),
            .joined_by_ms = gathering_.joined_by_ms(now_ms_)};
  }
  PlanInputs plan_inputs() const {
    return {.view = view(),
            .options = options_,
            .shape = shape_,
            .policy = policy_,
            .table = recovery_.table()};
  }
  double unix_now() const {
    return options_.unix_offset_s + static_cast<double>(now_ms_) / 1000;
  }
  int64_t total_steps() const { return options_.job.train().steps(); }
  bool job_finished() const { return ledger_.last_finished() >= total_steps(); }
  bool adopted() const { return durable_.generation() == adopted_generation_; }
  // Workers have had no time yet to find this life of the coordinator.
  bool just_started() const {
    return now_ms_ - roster_.started_ms() < kReconnectSlackMs;
  }

  // The parts of the durable state that the values write, each its own.
  pb::Refusals* refusals() { return durable_.mutable_refusals(); }
  pb::MeshRequest* mesh_request() { return durable_.mutable_mesh_request(); }
  pb::StopRequest* stop() { return durable_.mutable_stop(); }
  pb::Drains* drains() { return durable_.mutable_drains(); }
  pb::Branches* branches() { return durable_.mutable_branches(); }

  void set_phase(pb::Durable::Phase phase);  // persists
  // Persists and announces a change of the durable state; false if there is
  // none.
  bool record_change(std::optional<pb::EventRecord> change);
  void persist() { act(Persist{durable_}); }
  void emit(pb::EventRecord record);
  void emit(const events::EventKind& kind, const EventFields& fields = {}) {
    emit(event(kind, fields));
  }
  void act(Action action) { actions_.push_back(std::move(action)); }

  Options options_;
  const std::optional<planner::JobShape> shape_;
  const bool keeps_state_;
  int64_t now_ms_ = 0;
  int64_t planned_ms_ = 0;  // the newest generation; not before this life
  std::vector<Action> actions_;
  pb::Durable durable_;

  Admission admission_;
  NameOwners owners_;
  Roster roster_;
  StepLedger ledger_;
  StepTimes times_;
  CheckpointWatch checkpoints_;
  Gathering gathering_;
  FailureDetector detector_;
  MeshPolicy policy_;
  Recovery recovery_;
  StopPause pause_;
  StateRetention retention_;
  FenceRelay fences_;
  Directives directives_;
  mutable StatusReporter reporter_;

  int64_t adopted_generation_ = -1;  // started in an earlier life
  int64_t synced_step_ = 0;          // whose metrics are durable
  bool backlog_full_ = false;        // no further metrics are recorded
  int64_t phase_since_ms_ = 0;       // later by the time that does not count
  bool unsettled_ = false;  // inputs were taken since the last reconcile()
  bool exited_ = false;
  bool refused_job_ = false;
};

}  // namespace remesh::core
