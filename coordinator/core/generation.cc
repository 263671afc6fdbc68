// How the coordinator starts and ends generations, and the job.
#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/memory/state_info.h"
#include "coordinator/core/coordinator.h"
#include "coordinator/core/durable.h"
#include "coordinator/core/failure_budget.h"
#include "coordinator/core/job_shape.h"
#include "proto/base/exit_code.h"
#include "proto/base/text.h"
#include "proto/limits/plausible.h"

namespace remesh::core {

using geometry::Layout;

// How often it is checked whether the states fit when they did not.
constexpr int64_t kLookForRoomMs = 1000;

// ------------------------------------------------------------------- start

void Coordinator::plan(const CheckpointsScanned& scan) {
  ledger_.prove(scan.valid);
  for (const std::string& damaged : scan.invalid) {
    if (!reported_damaged_.insert(damaged).second) continue;
    pb::EventRecord e = event(events::kCheckpointDamaged);
    e.set_cause(damaged);
    emit(std::move(e));
  }
  const ClusterView now = view();
  const Recovery::Inputs in{.view = now,
                            .ledger = ledger_,
                            .scan = scan,
                            .policy = policy_,
                            .missing_holders = retention_.missing_holders(now)};
  const StateChoice newest = recovery_.newest(in);
  if (newest.step > total_steps())
    restore_steps(newest.generation, newest.step, newest_generation(scan) + 1);
  if (overtaken()) return refuse_job(newest.why);
  if (const auto* last = recovery_.final_checkpoint(in)) {
    restore_steps(generation_of(*last), last->step,
                  newest_generation(scan) + 1);
    return terminate(pb::Durable::DONE, "");
  }
  const auto wanted = policy_.place(now);
  if (!wanted.ok()) return;  // workers were lost during the scan
  if (keeps_state() && !roster_.inventories_known(durable_.generation()))
    return;
  const Recovery::Decision decision = recovery_.decide(in, *wanted);
  if (decision.kind == Recovery::Decision::Kind::kWait) {
    if (decision.rescan_ms > 0) not_before_ms_ = now_ms_ + decision.rescan_ms;
    return wait_for(events::kWaitingForState, decision.why);
  }
  const bool gives_up = decision.kind == Recovery::Decision::Kind::kGiveUp;
  if ((gives_up || decision.source.step() < ledger_.last_finished()) &&
      others_may_load())
    return plan(scan);
  if (keeps_state()) durable_.set_rescue(decision.rescue);
  if (gives_up) {
    // A checkpoint that did not load may be sound, and the host bad.
    if (durable_.refusals().checkpoints().empty() ||
        !tries_another_host(*wanted, now))
      return terminate(pb::Durable::FAILED, decision.why);
    durable_.mutable_refusals()->clear_checkpoints();
    return plan(scan);
  }
  pb::Assignment assignment = assignment_of(decision);
  const std::vector<pb::Durable::Member> participants =
      add_workers(&assignment);
  std::string given_up;
  if (const Shortages s = fit_room(&assignment, &given_up); !s.empty()) {
    if (cordon_short(s, assignment)) return;
    not_before_ms_ = now_ms_ + kLookForRoomMs;
    if (const std::string text = to_text(s); text != waiting_for_)
      wait_for(events::kWaitingForRoom, text);
    return;
  }
  const int64_t next = newest_generation(scan) + 1;
  assignment.set_generation(next);
  if (!given_up.empty())
    assignment.mutable_source()->mutable_reason()->append("; " + given_up);
  restore_steps(decision.generation, decision.source.step(), next);
  abandon_checkpoints(scan, decision.source.step());
  durable_.mutable_participants()->Assign(participants.begin(),
                                          participants.end());
  begin_generation(decision, std::move(assignment));
}

Shortages Coordinator::fit_room(pb::Assignment* assignment,
                                std::string* given_up) const {
  if (!keeps_state()) return {};
  return core::fit_room(recovery_.table(), roster_, replicas_fit_, assignment,
                        given_up);
}

// What would not fit if the mesh changed now. *next: the assignment that was
// tried.
Shortages Coordinator::shortages_after(const pb::Assignment& running,
                                       pb::Assignment* next) const {
  if (!keeps_state() || durable_.rescue()) return {};
  auto placed = policy_.place(view());
  if (!placed.ok()) return {};
  *next = assignment_of({.placement = std::move(placed).value()});
  add_workers(next);
  start_from(running, recovery_.table(), next);
  std::string given_up;
  return core::fit_room(recovery_.table(), roster_, true, next, &given_up,
                        &running);
}

// Training continues rather than stop for a mesh whose states do not fit. Hosts
// that are short, and that the running mesh does without, are cordoned.
bool Coordinator::put_off_for_room(const MeshPolicy::MeshChange& change) {
  if (change.must || durable_.stop_requested()) return false;
  pb::Assignment next;
  const Shortages s = shortages_after(durable_.assignment(), &next);
  if (s.empty()) return false;
  if (cordon_short(s, next)) return true;
  no_change_before_ms_ = now_ms_ + kDeclinedStopMs;
  const std::string text = to_text(s);
  if (text == put_off_) return true;
  put_off_ = text;
  pb::EventRecord e = event(events::kChangePutOff);
  e.set_cause(text);
  e.set_detail(change.why);
  emit(std::move(e));
  return true;
}

// The job continues from `step`: newer checkpoints, which could not be used,
// are on an abandoned branch, and nobody waits for them any more.
void Coordinator::abandon_checkpoints(const CheckpointsScanned& scan,
                                      int64_t step) {
  if (durable_.saved_step() <= step) return;
  int64_t newest = 0;
  for (const CheckpointInfo& c : scan.valid)
    if (c.step <= step) newest = std::max(newest, c.step);
  durable_.set_saved_step(newest);
  checkpoints_.forget_after(newest);
}

// Finishes the steps up to that one of a state of `generation`, from which
// generation `next` continues.
void Coordinator::restore_steps(int64_t generation, int64_t step,
                                int64_t next) {
  const int64_t first = ledger_.last_finished() + 1;
  if (first <= step && 0 < generation && generation + 1 < next) {
    // Generations between the two began before these steps were finished: their
    // versions of them are their own.
    ledger_.abandon({.generation = next, .step = first, .after = generation});
    pb::Durable::Abandoned* a = durable_.add_abandoned();
    a->set_generation(next);
    a->set_step(first);
    a->set_after(generation);
    persist();  // before the steps are in the metrics log
  }
  for (const auto& entry : ledger_.restore(generation, step)) record(entry);
}

// As the journal or, if it was lost, the checkpoints know it.
int64_t Coordinator::newest_generation(const CheckpointsScanned& scan) const {
  int64_t newest = durable_.generation();
  const auto take = [&](int64_t other) {
    if (other <= limits::kMaxNumber) newest = std::max(newest, other);
  };
  take(scan.claimed);
  for (const CheckpointInfo& c : scan.valid)
    for (const pb::StepMetrics& m : c.recent) take(m.generation());
  return newest;
}

pb::Assignment Coordinator::assignment_of(
    const Recovery::Decision& decision) const {
  pb::Assignment a;
  const planner::Placement& placement = decision.placement;
  *a.mutable_source() = decision.source;
  *a.mutable_mesh() = mesh_of(placement.layout);
  if (!placement.prediction.empty()) a.set_prediction(placement.prediction);
  a.mutable_microbatches()->Assign(placement.shares.begin(),
                                   placement.shares.end());
  const auto threads = static_cast<int>(options_.job.train().threads());
  for (const planner::RankPlace& p : placement.ranks) {
    pb::RankPlace* out = a.add_ranks();
    out->set_rank(p.rank);
    out->set_worker(p.worker);
    out->set_local_slot(p.local_slot);
    out->set_threads(threads > 0 ? threads : p.threads);
  }
  *a.mutable_job() =
      shape_ ? job_on(options_.job, *shape_, placement.layout) : options_.job;
  a.set_run_dir(options_.run_dir);
  a.set_run_id(durable_.run_id());
  if (!placement.ranks.empty())
    a.set_build(roster_.members().at(placement.ranks[0].worker).report.build());
  if (policy_.wants_hardware() && !times_.knows_link(hosts_of(a)))
    a.set_measure_link(true);
  return a;
}

std::set<std::string> Coordinator::hosts_of(const pb::Assignment& a) const {
  std::set<std::string> hosts;
  for (const pb::RankPlace& p : a.ranks())
    hosts.insert(roster_.members().at(p.worker()).report.host());
  return hosts;
}

// Every live worker participates, with ranks or as a spare, unless it is
// leaving and has no ranks.
std::vector<pb::Durable::Member> Coordinator::add_workers(
    pb::Assignment* a) const {
  std::vector<pb::Durable::Member> participants;
  std::set<std::string_view> placed;
  for (const pb::RankPlace& p : a->ranks()) placed.insert(p.worker());
  for (const auto& [name, m] : roster_.members()) {
    if (!m.alive || !m.reported || m.report.slots() < 1 ||
        (m.leaving() && !placed.contains(name)))
      continue;
    a->add_workers(name);
    a->add_hosts(m.report.host());
    pb::Durable::Member& p = participants.emplace_back();
    p.set_name(name);
    p.set_incarnation(m.report.incarnation());
    p.set_host(m.report.host());
    p.set_host_id(m.report.host_id());
    p.set_slots(m.report.slots());
    p.set_cores(m.report.cores());
    p.set_memory_bytes(m.report.memory_bytes());
  }
  count_ranks(a);
  return participants;
}

void Coordinator::begin_generation(const Recovery::Decision& decision,
                                   pb::Assignment a) {
  ledger_.forget_finished();
  durable_.set_generation(a.generation());
  replicas_fit_ = true;
  lost_steps_ =
      std::max<int64_t>(0, ledger_.last_finished() - a.source().step());
  pb::EventRecord e = event(events::kMesh);
  *e.mutable_mesh() = a.mesh();
  if (const auto before = mesh_before()) *e.mutable_from() = *before;
  e.set_source(source_text(a.source()));
  e.set_source_kind(a.source().kind());
  e.set_lost_steps(lost_steps_);
  e.set_detail(decision.placement.reason + "; " + a.source().reason());
  add_past_steps(&a);
  *durable_.mutable_assignment() = std::move(a);
  *durable_.mutable_assignment_job() = options_.job;
  times_.begin(decision.placement.layout, hosts_of(durable_.assignment()));
  waiting_for_.clear();
  recovery_.begin_generation();
  retention_.begin_generation();
  roster_.begin_generation();
  std::string released;
  if (!durable_.rescue()) {
    released = release_pin(decision.placement.layout);
    durable_.mutable_mesh_request()->clear_changed();
  }
  set_phase(pb::Durable::PREPARING);
  if (!released.empty()) emit_pin_released(released);
  emit(std::move(e));
}

// The mesh of the newest generation or, if the journal was lost or the job
// resumed, of the last finished step.
std::optional<pb::Mesh> Coordinator::mesh_before() const {
  if (durable_.assignment().ranks_size() > 0)
    return durable_.assignment().mesh();
  const auto* last = ledger_.last_metrics();
  if (last && last->has_mesh()) return last->mesh();
  return std::nullopt;
}

void Coordinator::wait_for(const events::EventKind& kind,
                           const std::string& what) {
  if (what.empty()) return;
  waiting_for_ = what;
  pb::EventRecord e = event(kind);
  e.set_detail(what);
  emit(std::move(e));
}

// ------------------------------------------------------- released requests

// Unpins the layout if `chosen` is another one; returns the layout.
std::string Coordinator::release_pin(const Layout& chosen) {
  const auto pin = pinned_layout(durable_.mesh_request());
  if (!pin || *pin == chosen) return "";
  durable_.mutable_mesh_request()->clear_pinned();
  return pin->to_string();
}

void Coordinator::emit_pin_released(const std::string& layout) {
  pb::EventRecord e = event(events::kMeshReleased);
  e.set_detail(fmt::format(
      "not enough slots for {}; falling back to automatic mesh selection",
      layout));
  emit(std::move(e));
}

// Slots were lost before the change to the pinned layout began.
void Coordinator::release_unfit_pin() {
  if (durable_.phase() != pb::Durable::RUNNING || !policy_.pin_is_unfit(view()))
    return;
  const std::string layout =
      pinned_layout(durable_.mesh_request())->to_string();
  durable_.mutable_mesh_request()->clear_pinned();
  durable_.mutable_mesh_request()->clear_changed();
  persist();
  emit_pin_released(layout);
}

// The scale admitted the layout that was pinned, and admits none of the job's
// own.
void Coordinator::release_scale(const std::string& why) {
  pb::EventRecord e = event(events::kScaleReleased);
  e.set_detail(fmt::format("using all slots again: {}", why));
  durable_.mutable_mesh_request()->clear_scale();
  persist();
  emit(std::move(e));
}

// --------------------------------------------------------------------- end

void Coordinator::finish(const MeshPolicy::MeshChange& change) {
  if (change_began_ms_ < 0) change_began_ms_ = now_ms_;
  pb::Finish* f = durable_.mutable_finish();
  f->set_reason(change.why);
  f->set_must_stop(change.must);
  pb::Assignment next;
  f->set_save(roster_.committed_step(durable_) > total_steps() ||
              retention_.must_save_to_finish(view(), policy_) ||
              !shortages_after(durable_.assignment(), &next).empty());
  checkpoints_.expect_stop(roster_);
  set_phase(pb::Durable::FINISHING);
}

void Coordinator::abort(const Failure& failure) {
  failure_ = failure;
  if (change_began_ms_ < 0) change_began_ms_ = now_ms_;
  *durable_.mutable_cause() = cause_of(failure);
  set_phase(pb::Durable::ABORTING);
}

void Coordinator::end_generation() {
  const bool aborted = durable_.phase() == pb::Durable::ABORTING;
  std::optional<Failure> fault;
  if (aborted && failure_ && failure_->is_fault) {
    fault = detector_.settle(*failure_, view());
    *durable_.mutable_cause() = cause_of(*fault);
    times_.add_failure();
    if (fault->exit_code != kExitSaveFailed) emit_failure(*fault);
  } else if (!aborted) {
    pb::EventRecord e = event(events::kGenerationEnded);
    const std::string& reason = durable_.finish().reason();
    e.set_detail(reason.empty() ? "all ranks finished" : reason);
    emit(std::move(e));
    if (change_began_ms_ < 0) change_began_ms_ = now_ms_;
  }
  std::vector<pb::Cordon> cordoned;
  Consequence consequence = Consequence::kNone;
  if (fault && fault->exit_code != kExitSaveFailed) {
    count_failure(*fault, ledger_.last_finished(), durable_.mutable_budget());
    consequence = cordon_for(*fault, &cordoned);
  }
  failure_.reset();
  fences_.clear();
  checkpoints_.end_generation();
  detector_.end_generation();
  unreached_.clear();
  for (const pb::Durable::Member& p : durable_.participants())
    if (has_ranks(durable_, p.name()) &&
        roster_.find_alive(p.name()) == nullptr)
      unreached_.insert(p.name());
  durable_.clear_participants();
  durable_.clear_finish();
  gathering_ = false;
  if (fault && !try_again_after(*fault, consequence)) return;
  // Ranks finish the last step in order only after they saved it.
  if (!aborted && job_finished())
    return overtaken() ? refuse_job("") : terminate(pb::Durable::DONE, "");
  finish_checked_ = false;
  set_phase(pb::Durable::WAITING);
  for (const pb::Cordon& c : cordoned) emit_cordon(c);
  reconcile_waiting();
}

void Coordinator::emit_failure(const Failure& fault) {
  pb::EventRecord e = event(events::kFailure);
  e.set_cause(fault.what);
  e.set_worker(fault.worker);
  if (fault.rank >= 0) e.set_rank(fault.rank);
  for (const RankView& r : rank_views(view()))
    if (r.status->rank() == fault.rank && r.worker == fault.worker)
      fill_failure(r, &e);
  for (const pb::Durable::Member& p : durable_.participants())
    if (p.name() == fault.worker && !e.has_host()) e.set_host(p.host());
  e.set_seconds(static_cast<double>(now_ms_ - change_began_ms_) / 1000);
  emit(std::move(e));
}

// False if the job has failed.
bool Coordinator::try_again_after(const Failure& fault,
                                  Consequence consequence) {
  if (fault.exit_code == kExitSaveFailed) {
    if (durable_.stop_requested() && !durable_.stop_discards())
      decline_stop(fault.text());
    const int64_t wait_ms = wait_for_room_ms(++failed_saves_);
    not_before_ms_ = now_ms_ + wait_ms;
    const std::string& error = checkpoints_.last_error();
    wait_for(events::kWaitingForRoom,
             fmt::format("step {} is not saved: {}; trying again in {}",
                         ledger_.last_finished(),
                         error.empty() ? fault.text() : error,
                         format_duration(static_cast<double>(wait_ms) / 1000)));
    return true;
  }
  if (fault.exit_code == kExitNoRoom && consequence != Consequence::kCordoned)
    replicas_fit_ = false;
  const pb::Source& source = durable_.assignment().source();
  const FailureVerdict verdict =
      judge_failure(fault, options_.job.elastic(), consequence, source,
                    durable_.host_faults(), durable_.mutable_budget());
  if (verdict.bad_source)
    refuse_source(source, roster_, durable_.mutable_refusals());
  if (verdict.give_up) {
    terminate(pb::Durable::FAILED, verdict.reason);
    return false;
  }
  if (verdict.backoff_ms > 0) not_before_ms_ = now_ms_ + verdict.backoff_ms;
  return true;
}

bool Coordinator::holds_unsaved_step(const Roster::Member& m) const {
  const auto& held = m.report.holdings();
  return has_unsaved_steps() &&
         std::any_of(held.begin(), held.end(), [&](const auto& h) {
           return h.step() >= ledger_.last_finished();
         });
}

// Says where the last finished step is if no checkpoint has it.
std::string Coordinator::only_in_memory() const {
  std::vector<std::string> holders;
  for (const auto& [name, m] : roster_.members())
    if (m.alive && holds_unsaved_step(m)) holders.push_back(name);
  if (holders.empty()) return "";
  return fmt::format(
      "step {} is in no checkpoint, but in the memory of {} for at least {} "
      "minutes; resume the job to continue from it",
      ledger_.last_finished(), join(holders), memory::kStateKeptS / 60);
}

std::string Coordinator::who_was_not_reached() const {
  if (unreached_.empty()) return "";
  return fmt::format(
      "{} not reached: {}; ranks there may run until they learn of the end",
      unreached_.size() == 1 ? "1 worker was"
                             : plural(unreached_.size(), "worker") + " were",
      join({unreached_.begin(), unreached_.end()}));
}

// The job was given fewer steps than it has made.
void Coordinator::refuse_job(const std::string& where) {
  refused_job_ = true;
  const int64_t done = ledger_.last_finished();
  terminate(
      pb::Durable::STOPPED,
      fmt::format("train.steps = {}, but step {} is finished{}; give more "
                  "steps, for example --set train.steps={}",
                  total_steps(), done, where.empty() ? "" : " (" + where + ")",
                  2 * done));
}

void Coordinator::terminate(pb::Durable::Phase phase, const std::string& why) {
  *durable_.mutable_cause() = cause_of({.what = why});
  durable_.clear_participants();
  // A resumed job waits for those who hold the state.
  if (phase == pb::Durable::DONE || !has_unsaved_steps())
    durable_.clear_assignment();
  set_phase(phase);
  pb::EventRecord e =
      event(phase == pb::Durable::DONE     ? events::kJobDone
            : phase == pb::Durable::FAILED ? events::kJobFailed
                                           : events::kJobStopped);
  if (phase == pb::Durable::FAILED || refused_job_) e.set_cause(why);
  if (phase != pb::Durable::DONE) {
    std::vector<std::string> details;
    for (const std::string& d : {who_was_not_reached(), only_in_memory()})
      if (!d.empty()) details.push_back(d);
    if (!details.empty()) e.set_detail(join(details, "; "));
  }
  emit(std::move(e));
  terminal_since_ms_ = now_ms_;
}

}  // namespace remesh::core
