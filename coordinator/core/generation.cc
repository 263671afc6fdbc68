// Coordinator: its generations, members, steps and cordons, and its end.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "coordinator/core/coordinator.h"
#include "coordinator/core/drains.h"
#include "coordinator/core/durable.h"
#include "proto/base/text.h"

namespace remesh::core {

void Coordinator::plan(const CheckpointsScanned& scan) {
  ledger_.prove(scan.valid);
  for (const InvalidCheckpoint& c : checkpoints_.new_damages(scan))
    emit(events::kCheckpointDamaged, {.cause = c.why});
  const ClusterView now = view();
  const Recovery::Inputs in{.view = now,
                            .ledger = ledger_,
                            .scan = scan,
                            .policy = policy_,
                            .missing_holders = retention_.missing_holders(now)};
  // Neither the journal nor, if that was lost, the checkpoints know it.
  const int64_t number = newest_generation(scan, durable_.generation()) + 1;
  const StateChoice newest = recovery_.newest(in);
  if (newest.step > total_steps())
    restore_steps(newest.generation, newest.step, number);
  if (ledger_.last_finished() > total_steps())
    return end_finished_job(newest.why);
  const StateChoice end = recovery_.saved_end(in);
  if (end.kind == pb::Source::CHECKPOINT) {
    restore_steps(end.generation, end.step, number);
    return terminate(pb::Durable::DONE, "");
  }
  const auto wanted = policy_.place(now);
  if (!wanted.ok()) return;  // workers were lost during the scan
  if (keeps_state_ && !states_known(now)) return;
  const Recovery::Decision decision = recovery_.decide(in, *wanted);
  if (decision.kind == Recovery::Decision::Kind::kWait) {
    if (decision.rescan_ms > 0)
      gathering_.back_off(now_ms_ + decision.rescan_ms);
    if (decision.why) wait_for({pb::JobStatus::FINISHED_STEPS, *decision.why});
    return;
  }
  const bool gives_up = decision.kind == Recovery::Decision::Kind::kGiveUp;
  if ((gives_up || decision.source.step() < ledger_.last_finished()) &&
      cordon([&](Cordoning& c) { return c.for_loading(refusals()); }))
    return plan(scan);
  if (keeps_state_) durable_.set_rescue(decision.rescue);
  if (gives_up)
    return try_elsewhere(*wanted, now, refusals()) ||
                   forgive_unreadable(refusals())
               ? plan(scan)
               : terminate(pb::Durable::FAILED, *decision.why);
  Plan next = make_plan(decision, plan_inputs(), gathering_.replicas_fit());
  if (!next.short_of.empty()) return wait_for_room(next);
  next.assignment.set_generation(number);
  if (decision.source.kind() != pb::Source::MEMORY)
    restore_steps(decision.generation, decision.source.step(), number);
  durable_.set_saved_step(checkpoints_.go_back(decision.source.step(),
                                               durable_.saved_step(), scan,
                                               durable_.refusals()));
  begin_generation(decision, std::move(next), scan.valid);
}

void Coordinator::wait_for_room(const Plan& plan) {
  if (cordon([&](Cordoning& c) { return c.for_room(plan); })) return;
  if (durable_.stop().asked()) {
    emit(decline_stop(to_text(plan.short_of), stop()));
    persist();
  }
  if (gathering_.wait_for_room(plan.short_of, now_ms_))
    emit(event_of(gathering_.waiting_for()));
}

void Coordinator::begin_generation(
    const Recovery::Decision& decision, Plan plan,
    const std::vector<CheckpointInfo>& checkpoints) {
  pb::Assignment& a = plan.assignment;
  ledger_.forget_finished();
  pb::EventRecord e =
      mesh_event(a, mesh_before(durable_, ledger_), ledger_.last_finished(),
                 decision.placement.reason);
  if (options_.job.train().max_skipped_steps() > 0)
    add_past_steps(ledger_, decision.generation, checkpoints, &a);
  adopt_plan(std::move(plan), options_.job, &durable_);
  std::optional<pb::EventRecord> unpinned;
  if (!durable_.rescue())
    unpinned = release_other_pin(decision.placement.layout, mesh_request());
  ledger_.continue_from_source(durable_.assignment(), branches());
  planned_ms_ = now_ms_;
  pause_.begin_generation();
  times_.begin(decision.placement.layout, hosts_of(decision.placement, roster_),
               e.lost_steps());
  gathering_.begin_generation();
  recovery_.begin_generation();
  checkpoints_.begin_generation();
  retention_.begin_generation();
  roster_.begin_generation();
  set_phase(pb::Durable::PREPARING);
  if (unpinned) emit(std::move(*unpinned));
  emit(std::move(e));
}

// ------------------------------------------------------- members and steps

void Coordinator::announce(const Roster::Changes& changes) {
  using Kind = Roster::MembershipChange::Kind;
  for (const Roster::MembershipChange& c : changes) {
    const bool over = terminal(durable_.phase());
    if (!over || c.kind == Kind::kLeaving) emit(event_of(c, durable_));
    if (c.sent_away && finish_drain(c.worker, c.incarnation, drains()) && !over)
      persist();
    if (!over && c.kind == Kind::kLost &&
        forgive_source(durable_.assignment().source(), c.worker, refusals()))
      persist();
  }
}

void Coordinator::finish_steps(int64_t committed) {
  const pb::Source& source = durable_.assignment().source();
  // Steps that are computed again, or that an earlier life recorded, also show
  // that the generation makes progress.
  if (committed > source.step()) {
    const bool first = detector_.note_progress();
    cordon([&](Cordoning& c) { return c.after_step(first); });
  }
  if (durable_.assignment().measure_link())
    times_.set_link(roster_.link_bytes_per_s(durable_.generation()), now_ms_);
  if (backlog_full_) return;
  // A state in memory proves nothing until all ranks have restored it.
  const int64_t number = durable_.generation();
  if (ledger_.origin(number, committed)) {
    if (just_started() && ledger_.last_known(number) < source.step()) return;
    restore_steps(number, source.step(), number + 1);
  }
  for (const auto& entry : ledger_.advance(number, committed)) {
    record(entry);
    detector_.note_step(entry.metrics->step_s());
    times_.add_step(entry.metrics->step_s(), now_ms_);
    if (durable_.phase() != pb::Durable::RUNNING) continue;
    if (const auto pause = times_.resume(now_ms_))
      emit(training_event(view(), entry.metrics->step(), *pause));
  }
}

void Coordinator::record(const StepLedger::Entry& entry) {
  if (entry.gap_first > 0) emit(gap_event(entry));
  if (!entry.metrics) return;
  act(AppendMetrics{*entry.metrics});
  if (entry.metrics->skipped()) emit(skipped_event(*entry.metrics));
}

// Finishes the steps up to that one of a state of `generation`, from which
// generation `next` continues.
void Coordinator::restore_steps(int64_t generation, int64_t step,
                                int64_t next) {
  if (const auto from = ledger_.origin(generation, step))
    restore_steps(from->generation, from->step, generation);
  if (ledger_.abandon_between(generation, step, next, branches()))
    persist();  // before the steps are in the metrics log
  for (const auto& entry : ledger_.restore(generation, step)) record(entry);
}

Cordoning Coordinator::cordoning() {
  return Cordoning(
      {.view = view(),
       .policy = policy_,
       .elastic = options_.job.elastic(),
       .unix_s = unix_now(),
       .generation_s = static_cast<double>(now_ms_ - planned_ms_) / 1000,
       .stepped = detector_.has_stepped(),
       .faults = durable_.mutable_host_faults()});
}

bool Coordinator::cordon(const std::function<bool(Cordoning&)>& decide) {
  Cordoning cordons = cordoning();
  const bool done = decide(cordons);
  if (cordons.changes().any) persist();
  for (pb::EventRecord& e : events_of(cordons.changes(), unix_now()))
    emit(std::move(e));
  return done;
}

// --------------------------------------------------------------------- end

void Coordinator::finish(const MeshPolicy::MeshChange& change) {
  times_.interrupt(now_ms_);
  pb::Finish* f = durable_.mutable_finish();
  f->set_reason(change.why);
  f->set_save(must_save_for_change(plan_inputs(), retention_));
  checkpoints_.expect_stop(roster_, f);
  set_phase(pb::Durable::FINISHING);
}

void Coordinator::abort(const pb::Cause& failure) {
  times_.interrupt(now_ms_);
  *durable_.mutable_cause() = failure;
  set_phase(pb::Durable::ABORTING);
}

void Coordinator::end_generation() {
  const bool aborted = durable_.phase() == pb::Durable::ABORTING;
  const bool last_step = roster_.committed_step(durable_) >= total_steps();
  const bool killed = killed_by_worker(view());
  Cordoning cordons = cordoning();
  FailureVerdict verdict;
  if (!aborted) {
    const std::string& reason = durable_.finish().reason();
    emit(events::kGenerationEnded,
         {.detail = reason.empty() ? "all ranks finished" : reason});
    times_.interrupt(now_ms_);
  } else if (!durable_.cause().planned()) {
    const pb::Cause fault = detector_.settle(durable_.cause(), view());
    *durable_.mutable_cause() = fault;
    times_.add_failure();
    verdict = cordons.judge(fault, durable_.mutable_budget(), refusals());
    if (!verdict.unsaved)
      emit(event_of(fault, view(), times_.interrupted_s(now_ms_)));
  }
  for (const pb::LinkSearch& test : cordons.changes().tests)
    emit(event_of(test));
  fences_.clear();
  checkpoints_.end_generation();
  detector_.end_generation();
  roster_.end_generation(durable_);
  durable_.clear_participants();
  durable_.clear_finish();
  gathering_.end_generation(verdict, now_ms_);
  if (verdict.give_up) return terminate(pb::Durable::FAILED, verdict.reason);
  if (verdict.unsaved) wait_to_save();
  if (verdict.unreadable) wait_for(no_inputs(durable_, verdict.backoff_ms));
  // Ranks that finish the last step in order have saved it, unless their
  // workers killed them before. It may have been finished before by a
  // generation that failed to save it.
  if (!aborted && !killed && last_step && job_finished())
    return end_finished_job("");
  set_phase(pb::Durable::WAITING);
  for (const pb::Cordon& c : cordons.changes().begun)
    emit(event_of(c, unix_now()));
  reconcile_waiting();
}

// The ranks ended because they could not save; the next ones try again.
void Coordinator::wait_to_save() {
  const std::string why = text_of(durable_.cause());
  if (durable_.stop().asked() && !durable_.stop().discards())
    emit(decline_stop(why, stop()));
  const int64_t wait_ms = wait_for_storage_ms(checkpoints_.count_failed_end());
  gathering_.back_off(now_ms_ + wait_ms);
  wait_for(unsaved_end(ledger_, checkpoints_, why, wait_ms));
}

// It is refused if it was given fewer steps than it has made.
void Coordinator::end_finished_job(const std::string& where) {
  if (ledger_.last_finished() <= total_steps())
    return terminate(pb::Durable::DONE, "");
  refused_job_ = true;
  terminate(pb::Durable::STOPPED,
            too_few_steps(total_steps(), ledger_.last_finished(), where));
}

void Coordinator::terminate(pb::Durable::Phase phase, const std::string& why) {
  *durable_.mutable_cause() = cause_of(why);
  durable_.clear_participants();
  // A resumed job waits for those who hold the state.
  if (phase == pb::Durable::DONE || !retention_.has_unsaved_steps(view()))
    durable_.clear_assignment();
  set_phase(phase);
  emit(end_event(phase, phase == pb::Durable::FAILED || refused_job_ ? why : "",
                 roster_.unreached_text(), retention_.only_in_memory(view())));
}

}  // namespace remesh::core
