#include "coordinator/core/coordinator.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "coordinator/core/durable.h"
#include "coordinator/core/job_shape.h"
#include "proto/base/exit_code.h"
#include "proto/limits/plausible.h"

namespace remesh::core {
namespace {

constexpr int64_t kShutdownGraceMs = 3000;  // for workers to receive SHUTDOWN
constexpr int64_t kOwnAbsenceMs = 300;      // several missed ticks
constexpr char kDiscarded[] = "stopped without saving";

}  // namespace

Coordinator::Coordinator(Options options)
    : options_(std::move(options)),
      shape_(shape_of(options_.job)),
      keeps_state_(shape_ && options_.job.elastic().keep_state()),
      admission_(options_.protocol),
      gathering_(options_.job.elastic().join_window_ms()),
      detector_(options_.job.elastic()),
      policy_(options_.job, shape_, options_.core),
      recovery_(options_.job,
                keeps_state_
                    ? std::optional(geometry::ParamTable::make(shape_->model))
                    : std::nullopt),
      retention_(options_.job.elastic(), keeps_state_) {}

std::vector<Action> Coordinator::start(int64_t now_ms) {
  now_ms_ = phase_since_ms_ = planned_ms_ = now_ms;
  times_ = StepTimes(now_ms);
  roster_ = Roster(now_ms);
  durable_ = restore(options_, keeps_state_);
  ledger_ = StepLedger(options_.last_finished_step, options_.recent_metrics,
                       options_.first_steps, durable_.branches());
  if (durable_.saved_step() > 0) checkpoints_.know(durable_.saved_step());
  owners_ = NameOwners(durable_.name_owners());
  if (!policy_.check_scale(view(), durable_.mesh_request().scale()).ok())
    mesh_request()->clear_scale();
  if (terminal(durable_.phase())) {
    phase_since_ms_ -= kShutdownGraceMs;  // nobody is waiting
  } else if (leave_unknown_generation(&durable_)) {
    // Who must be waited for is not known, either: all have time to find this
    // coordinator.
    gathering_.back_off(now_ms_ + kReconnectSlackMs);
    roster_.expect_unheard(now_ms_ + kReconnectSlackMs);
  } else if (durable_.phase() != pb::Durable::WAITING) {
    // The participants are taken for alive until they had that time.
    adopted_generation_ = durable_.generation();
    roster_.adopt(durable_, now_ms_ + kReconnectSlackMs);
    times_.adopt(durable_, options_.recent_metrics, now_ms_);
    checkpoints_.adopt(durable_.finish());
  }
  if (options_.restored && !terminal(options_.restored->phase()))
    roster_.expect_unheard(now_ms_ + kReconnectSlackMs);
  persist();
  for (pb::EventRecord& e :
       start_events(options_, durable_, roster_.members().size()))
    emit(std::move(e));
  reconcile();
  return std::exchange(actions_, {});
}

// ------------------------------------------------------------------ inputs

std::vector<Action> Coordinator::on(const Input& input, int64_t now_ms) {
  actions_ = settle(now_ms);
  hear(input, now_ms);
  reconcile();
  return std::exchange(actions_, {});
}

std::vector<Action> Coordinator::take(const Input& input, int64_t now_ms) {
  hear(input, now_ms);
  unsettled_ = true;
  return std::exchange(actions_, {});
}

std::vector<Action> Coordinator::settle(int64_t now_ms) {
  if (std::exchange(unsettled_, false) && !exited_) {
    advance_to(now_ms);
    reconcile();
  }
  return std::exchange(actions_, {});
}

void Coordinator::hear(const Input& input, int64_t now_ms) {
  // The last lines may wait for room, and somebody asks why.
  if (exited_ && !is_question(input)) return;
  advance_to(now_ms);
  std::visit([this](const auto& e) { handle(e); }, input);
}

// While this process itself did not run (stopped, swapped out, suspended
// host), the workers were not silent: nobody was listening.
void Coordinator::advance_to(int64_t now_ms) {
  const int64_t gap_ms = now_ms - std::exchange(now_ms_, now_ms);
  if (gap_ms < kOwnAbsenceMs) return;
  planned_ms_ += gap_ms;
  roster_.on_own_absence(gap_ms);
  if (terminal(durable_.phase())) phase_since_ms_ += gap_ms;
  roster_.expect_unheard(now_ms + kReconnectSlackMs);
}

// Nobody could do what the phase waits for before it was written, and nobody
// could report or make progress while the storage was stalled.
void Coordinator::handle(const Tick& e) {
  phase_since_ms_ += e.unwritten_ms;
  planned_ms_ += e.unwritten_ms;
  pause_.on_unwritten(e.unwritten_ms);
  if (e.stalled_ms > 0) roster_.on_own_absence(e.stalled_ms);
  roster_.on_unwritten(std::max<int64_t>(0, e.unwritten_ms - e.stalled_ms));
  backlog_full_ = e.backlog_full;
  synced_step_ = std::max(synced_step_, e.synced_step);
}

// A report that does not count is answered with the reason; other messages that
// do not count are dropped.
void Coordinator::handle(const MessageReceived& e) {
  const pb::Envelope& m = e.message;
  if (m.has_report()) return take_report(m.report(), e.key);
  if (!limits::check(m).ok()) return admission_.drop();
  if (m.has_fence_in()) take_fence(m.fence_in());
}

void Coordinator::take_report(const pb::Report& report,
                              const std::string& key) {
  Admission::Verdict verdict = admission_.judge(report, key, view(), options_);
  if (verdict.refusal) act(Refuse{std::move(*verdict.refusal)});
  if (verdict.event) emit(std::move(*verdict.event));
  if (!verdict.report) return;
  const pb::Report& r = *verdict.report;
  const auto changes =
      roster_.on_report(r, durable_, detector_.silent_ms(), now_ms_);
  // The shell has asked whether the key may use the name.
  if (!key.empty() &&
      owners_.add(r.worker(), key, roster_, durable_.mutable_name_owners()))
    persist();
  announce(changes.value());
  if (r.coordinator_epoch() > durable_.epoch()) {
    // The worker ignores directives of an older epoch. If it follows a younger
    // coordinator, that one has journaled its epoch, so this write is refused,
    // and the shell ends. Otherwise the journal was lost or is older.
    persist();
    durable_.set_epoch(r.coordinator_epoch() + 1);
    persist();
  }
  if (r.generation() > durable_.generation()) skip_to_generation_of(r);
  for (const pb::StepMetrics* s : metrics_that_count(r, keeps_state_, durable_))
    ledger_.report(*s);
  for (const pb::Branches::Origin& o : r.origins()) ledger_.report(o);
}

// The journal was lost or rolled back. Numbers are never reused: a generation
// that was planned since ends, as workers may know its number from before.
void Coordinator::skip_to_generation_of(const pb::Report& r) {
  durable_.set_generation(r.generation());
  emit(journal_behind_event(durable_.generation(), r.worker()));
  if (durable_.phase() == pb::Durable::WAITING || terminal(durable_.phase()))
    return persist();
  call_off(
      fmt::format("worker {} knows generation {}, which the journal does not",
                  r.worker(), r.generation()));
}

void Coordinator::take_fence(const pb::FenceIn& f) {
  if (!takes_part(f, durable_)) return admission_.drop();
  const FenceRelay::Delivery delivery = fences_.add(f, durable_);
  for (const std::string& worker : delivery.workers)
    act(SendFence{worker, delivery.result});
}

void Coordinator::handle(const CommandReceived& e) {
  Cordoning cordons = cordoning();
  auto done = carry_out(e.command, {.view = view(),
                                    .policy = policy_,
                                    .mesh = mesh_before(durable_, ledger_),
                                    .cordons = &cordons,
                                    .directives = &directives_,
                                    .roster = &roster_,
                                    .drains = drains(),
                                    .stop = stop(),
                                    .mesh_request = mesh_request()});
  if (done.ok()) record_change(std::move(*done));
  act(Respond{e.client, reply_to(e.command, done.status(), status())});
}

void Coordinator::handle(const CheckpointsScanned& e) {
  if (gathering_.end_scan() && durable_.phase() == pb::Durable::WAITING)
    plan(e);
}

// --------------------------------------------------------------- reconcile

void Coordinator::reconcile() {
  if (exited_) return;
  const pb::Elastic& e = options_.job.elastic();
  announce(roster_.expire(durable_, e.dead_after_ms(), now_ms_,
                          e.closed_after_ms()));
  gathering_.observe(roster_, now_ms_);
  const int64_t committed = roster_.committed_step(durable_);
  for (const CheckpointWatch::Result& r :
       checkpoints_.observe(roster_, durable_.generation(),
                            std::max(ledger_.last_finished(), committed))) {
    if (r.error.empty()) {
      durable_.set_saved_step(std::max(durable_.saved_step(), r.step));
      forgive_checkpoint(r.step, refusals());
    }
    emit(event_of(r));
  }
  finish_steps(committed);
  retention_.observe(view());
  if (!terminal(durable_.phase()))
    cordon([](Cordoning& c) { return c.end_in_time(); });
  const pb::Durable::Phase phase = durable_.phase();
  if (phase == pb::Durable::WAITING)
    reconcile_waiting();
  else if (phase == pb::Durable::PREPARING)
    reconcile_preparing();
  else if (phase == pb::Durable::RUNNING || phase == pb::Durable::FINISHING)
    reconcile_live();
  else if (phase == pb::Durable::ABORTING && roster_.all_quiesced(durable_) &&
           detector_.source_fate_known(view()))
    end_generation();
  for (SendDirective& d : directives_.due({.view = view(),
                          .options = options_,
                          .policy = policy_,
                          .retention = retention_,
                          .fences = fences_,
                          .adopted = adopted(),
                          .synced_step = synced_step_},
                                          &roster_))
    act(std::move(d));
  if (terminal(durable_.phase())) reconcile_ended();
}

void Coordinator::reconcile_waiting() {
  if (durable_.stop().asked() &&
      !retention_.must_save_before_stop(view(), policy_)) {
    if (!retention_.awaits_unsaved_steps(view()))
      return terminate(pb::Durable::STOPPED, "stopped by request");
    constexpr auto kReason = pb::JobStatus::FINISHED_STEPS;
    if (gathering_.waiting_for().reason != kReason)
      wait_for({kReason, unsaved_text(ledger_.last_finished())});
    return;
  }
  const Gathering::Next next =
      gathering_.next(view(), policy_, retention_, recovery_, job_finished());
  if (next.no_mesh) emit(event_of(gathering_.waiting_for()));
  if (next.scan) act(ScanCheckpoints{durable_.saved_step()});
  if (!next.impossible) return;
  if (!record_change(release_scale(*next.impossible, mesh_request())))
    terminate(pb::Durable::FAILED, *next.impossible);
}

void Coordinator::reconcile_preparing() {
  if (durable_.stop().discards()) return call_off(kDiscarded);
  if (const auto failure = detector_.find_unprepared(
          view(), adopted(), adopted() && just_started()))
    return abort(*failure);
  const auto change = policy_.wanted_change(view(), pause_.until_ms());
  if (change && (durable_.stop().asked()
                     ? !retention_.must_save_before_stop(view(), policy_)
                     : change->must && !durable_.rescue()))
    return call_off(change->why);
  // A worker that was restarted may have lost its states with its host.
  if (roster_.all_prepared(durable_, gathering_.joined_by_ms(now_ms_)) &&
      source_is_there(roster_, durable_.assignment().source()))
    set_phase(pb::Durable::RUNNING);
}

void Coordinator::reconcile_live() {
  if (const auto failure = detector_.find(view())) return abort(*failure);
  if (roster_.all_quiesced(durable_)) return end_generation();
  if (durable_.stop().discards()) return call_off(kDiscarded);
  if (adopted() && !just_started())
    if (const auto ended = detector_.find_ended_before(view()))
      return abort(*ended);
  record_change(release_unfit_pin(view(), policy_, mesh_request()));
  const auto change = policy_.wanted_change(view(), pause_.until_ms());
  if (durable_.phase() == pb::Durable::RUNNING) {
    // RUN must have reached every worker before FINISH replaces it.
    if (change && roster_.all_started(durable_) && !put_off(*change))
      finish(*change);
    if (!change && now_ms_ >= pause_.until_ms()) {
      pause_.end();
      if (policy_.note_fulfilled(view(), mesh_request())) persist();
    }
    return;
  }
  // Something else may be asked for meanwhile.
  if (change) durable_.mutable_finish()->set_reason(change->why);
  if (!durable_.finish().save() && roster_.all_heard() &&
      retention_.must_save_to_finish(view(), policy_)) {
    durable_.mutable_finish()->set_save(true);
    persist();
  }
  // Ranks that could not save continue.
  if (!checkpoints_.stop_declined(view())) return;
  pause_.decline(roster_.committed_step(durable_), now_ms_);
  if (durable_.stop().asked())
    emit(decline_stop(checkpoints_.last_error(), stop()));
  else
    emit(events::kChangePutOff,
         {.cause = "saving failed: " + checkpoints_.last_error(),
          .detail = durable_.finish().reason()});
  times_.forget_interruption();
  set_phase(pb::Durable::RUNNING);
}

// Training continues while ranks may remember a stop that they declined, and if
// the states of the next mesh do not fit. Hosts that are short, and that the
// running mesh does without, are cordoned. A change because a worker leaves is
// put off only if ranks could not save for it a moment ago.
bool Coordinator::put_off(const MeshPolicy::MeshChange& change) {
  if (change.must && !must_save_for_change(plan_inputs(), retention_))
    return false;
  if (!pause_.allows_stop(roster_.committed_step(durable_), now_ms_))
    return true;
  if (durable_.stop().asked()) return false;
  if (change.must) return pause_.was_declined(now_ms_);
  const Plan next = plan_of_change(plan_inputs());
  if (next.short_of.empty()) return false;
  if (cordon([&](Cordoning& c) { return c.for_room(next); })) return true;
  if (pause_.put_off(next.short_of, now_ms_))
    emit(events::kChangePutOff,
         {.cause = to_text(next.short_of), .detail = change.why});
  return true;
}

void Coordinator::reconcile_ended() {
  if (now_ms_ - phase_since_ms_ < kShutdownGraceMs &&
      (!roster_.none_alive() || roster_.awaits_unheard(now_ms_)))
    return;
  exited_ = true;
  act(Exit{durable_.phase() == pb::Durable::FAILED ? kExitFailed
           : refused_job_                          ? kExitUsage
                                                   : kExitOk,
           text_of(durable_.cause())});
}

// ------------------------------------------------------------------ common

pb::JobStatus Coordinator::status() const {
  return reporter_.status({.view = view(),
                           .options = options_,
                           .shape = shape_,
                           .policy = policy_,
                           .ledger = ledger_,
                           .keeps_state = keeps_state_,
                           .waiting_for = gathering_.waiting_for(),
                           .put_off = to_text(pause_.short_of()),
                           .dropped = admission_.dropped()});
}

bool Coordinator::record_change(std::optional<pb::EventRecord> change) {
  if (!change) return false;
  persist();
  emit(std::move(*change));
  return true;
}

void Coordinator::set_phase(pb::Durable::Phase phase) {
  durable_.set_phase(phase);
  phase_since_ms_ = now_ms_;
  roster_.begin_phase();
  persist();
}

void Coordinator::emit(pb::EventRecord e) {
  e.set_time(unix_now());
  e.set_generation(durable_.generation());
  if (!e.has_step()) e.set_step(ledger_.last_finished());
  reporter_.note(e);
  act(EmitEvent{std::move(e)});
}

}  // namespace remesh::core
