#include "coordinator/core/coordinator.h"

#include <fmt/format.h>

#include <algorithm>

#include "coordinator/core/job_shape.h"
#include "proto/base/check.h"
#include "proto/base/rng.h"

namespace remesh::core {
namespace {

constexpr int64_t kLostGraceMs = 250;   // broken connection -> dead
constexpr int64_t kGoodbyeMs = 3000;    // workers' time to hear SHUTDOWN
constexpr int64_t kOwnAbsenceMs = 300;  // several missed ticks
constexpr size_t kKeptEvents = 50;

bool terminal(pb::Durable::Phase p) {
  return p == pb::Durable::DONE || p == pb::Durable::FAILED ||
         p == pb::Durable::STOPPED;
}

}  // namespace

Coordinator::Coordinator(Options options)
    : options_(std::move(options)), shape_(shape_of(options_.job)) {
  if (shape_ && options_.job.elastic().keep_state())
    table_ = geometry::ParamTable::llama(shape_->model);
}

std::vector<Action> Coordinator::start(int64_t now_ms) {
  actions_.clear();
  now_ms_ = started_ms_ = phase_since_ms_ = loss_ms_ = now_ms;
  last_finished_ = options_.last_finished_step;
  last_metrics_ = options_.last_metrics;
  first_steps_ = options_.first_steps;
  if (options_.restored) durable_ = *options_.restored;
  // Where the journal is gone, the metrics still know.
  if (last_metrics_)
    durable_.set_generation(
        std::max(durable_.generation(), last_metrics_->generation()));
  const bool restart = options_.restored.has_value();
  durable_.set_epoch(std::max(durable_.epoch() + 1, options_.epoch_floor));
  if (terminal(durable_.phase()) && options_.resume) {
    durable_.set_phase(pb::Durable::WAITING);
    durable_.set_stop_requested(false);
    durable_.set_failures(0);
    durable_.set_same_failures(0);
    durable_.clear_cause();
    durable_.clear_bad_checkpoints();
    durable_.clear_bad_states();
  }
  if (keeps_state() && durable_.state_job() == 0)
    durable_.set_state_job(std::max<uint64_t>(
        1, hash64(fmt::format("{} {} {}", options_.run_dir,
                              options_.epoch_floor, durable_.epoch()))));
  if (!check_scale(durable_.scale()).ok()) durable_.clear_scale();
  if (terminal(durable_.phase())) {
    terminal_since_ms_ = now_ms_ - kGoodbyeMs;  // nobody is waiting
  } else if (durable_.phase() != pb::Durable::WAITING) {
    adopted_generation_ = durable_.generation();
    // Re-adopt: the participants are taken for alive until they had time to
    // find us again.
    for (const pb::Durable::Member& p : durable_.participants()) {
      Member m;
      m.report.set_worker(p.name());
      m.report.set_incarnation(p.incarnation());
      m.report.set_host(p.host());
      m.report.set_slots(p.slots());
      m.report.set_cores(p.cores());
      m.report.set_memory_bytes(p.memory_bytes());
      m.draining = drains(p.name(), p.incarnation());
      m.heard_ms = now_ms_ + kReconnectSlackMs;
      members_[p.name()] = m;
    }
    if (durable_.phase() == pb::Durable::ABORTING) {
      cause_ = Cause{.text = durable_.cause(),
                     .rank = durable_.cause_rank(),
                     .worker = durable_.cause_worker()};
      change_began_ms_ = now_ms_;
    }
  }
  persist();
  pb::EventRecord e =
      event(restart ? "coordinator_restarted" : "coordinator_started");
  if (restart && !members_.empty())
    e.set_detail(fmt::format("looks for the {} workers of generation {}",
                             members_.size(), durable_.generation()));
  emit(std::move(e));
  reconcile();
  return std::move(actions_);
}

std::vector<Action> Coordinator::on(const Event& event, int64_t now_ms) {
  actions_.clear();
  if (exited_) return {};
  notice_own_absence(now_ms);
  now_ms_ = now_ms;
  std::visit([this](const auto& e) { handle(e); }, event);
  reconcile();
  return std::move(actions_);
}

// When this process itself stood still (stopped, swapped, suspended host), the
// workers were not silent: nobody was listening.
void Coordinator::notice_own_absence(int64_t now_ms) {
  const int64_t gap = now_ms - now_ms_;
  if (gap < kOwnAbsenceMs) return;
  for (auto& [name, m] : members_) {
    m.heard_ms += gap;
    if (m.lost_ms >= 0) m.lost_ms += gap;
    for (auto& [rank, p] : m.progress) p.since_ms += gap;
  }
}

// ---------------------------------------------------------------- handlers

void Coordinator::handle(const ReportReceived& e) {
  const pb::Report& r = e.report;
  auto it = members_.find(r.worker());
  const bool known = it != members_.end();
  auto& newest = heard_[r.worker()];
  const auto this_one = std::make_pair(r.incarnation(), r.seq());
  if (r.worker().empty() || this_one <= newest ||
      (known && r.incarnation() < it->second.report.incarnation())) {
    ++dropped_;
    return;
  }
  newest = this_one;
  if (known && r.incarnation() > it->second.report.incarnation()) {
    // The younger life proves the older one dead.
    worker_gone(r.worker(), it->second, "restarted");
    it = members_.end();
  }
  const bool back = it != members_.end() && !it->second.alive;
  if (it == members_.end() || back) {
    if (it == members_.end())
      it = members_.insert_or_assign(r.worker(), Member{}).first;
    it->second.draining = drains(r.worker(), r.incarnation());
    it->second.alive = true;
    it->second.death.clear();
    last_join_ms_ = now_ms_;
    pb::EventRecord j = event(back ? "worker_back" : "worker_joined");
    j.set_worker(r.worker());
    j.set_detail(fmt::format("{} slots on {}", r.slots(), r.host()));
    if (!terminal(durable_.phase())) emit(std::move(j));
  }
  Member& m = it->second;
  if (!m.report.leaving() && r.leaving()) {
    pb::EventRecord l = event("worker_leaving");
    l.set_worker(r.worker());
    emit(std::move(l));
  }
  // What its ranks did while it was silent is not known, and its first words
  // may be of before.
  const int64_t gap = now_ms_ - m.heard_ms;
  if (gap > silent_ms())
    for (auto& [rank, p] : m.progress) p.since_ms += gap;
  for (const pb::RankStatus& s : r.ranks()) {
    Progress& p = m.progress[s.rank()];
    if (!m.reported || p.since_ms == 0 || p.value != s.progress() ||
        m.report.generation() != r.generation())
      p = {s.progress(), now_ms_};
  }
  m.report = r;
  m.reported = true;
  m.heard_ms = now_ms_;
  m.lost_ms = -1;
  if (r.coordinator_epoch() > durable_.epoch()) {
    // It follows a life that the journal does not know, and no older one.
    durable_.set_epoch(r.coordinator_epoch() + 1);
    persist();
  }
  if (r.generation() > durable_.generation()) skip_to(r);
  // While nothing runs, also words of those who were given up are welcome.
  const bool welcome = durable_.phase() == pb::Durable::WAITING ||
                       participates(r.worker(), r.incarnation());
  for (const pb::StepMetrics& s : r.metrics()) {
    if (s.step() <= last_finished_) continue;
    if (s.generation() < durable_.generation() ||
        (s.generation() == r.generation() && welcome))
      told_[s.generation()].emplace(s.step(), s);
  }
}

// Whether a command asked this life of the worker to go.
bool Coordinator::drains(const std::string& name, uint64_t incarnation) const {
  const auto& all = durable_.draining();
  return std::any_of(all.begin(), all.end(), [&](const auto& d) {
    return d.name() == name && d.incarnation() == incarnation;
  });
}

// A journal was lost: numbers are never used twice. A generation that was
// planned meanwhile has a number that its workers may have had before, so it
// ends.
void Coordinator::skip_to(const pb::Report& r) {
  pb::EventRecord e = event("journal_behind");
  e.set_worker(r.worker());
  e.set_detail(fmt::format("generation {} was used before: goes on above it",
                           r.generation()));
  emit(std::move(e));
  durable_.set_generation(r.generation());
  const pb::Durable::Phase phase = durable_.phase();
  if (phase == pb::Durable::PREPARING || phase == pb::Durable::RUNNING ||
      phase == pb::Durable::FINISHING)
    begin_abort({.text = fmt::format("worker {} knows generation {}, which "
                                     "the journal does not",
                                     r.worker(), r.generation()),
                 .failure = false});
  else
    persist();
}

void Coordinator::handle(const FenceReceived& e) {
  const pb::FenceIn& f = e.fence;
  if (f.generation() != durable_.generation() ||
      !participates(f.worker(), f.incarnation()) || !has_ranks(f.worker())) {
    ++dropped_;
    return;
  }
  auto& in = fences_[f.index()];
  const bool again = in.contains(f.worker());
  in[f.worker()] = f.blob();
  pb::FenceOut out;
  for (const std::string& w : durable_.assignment().workers()) {
    if (!has_ranks(w)) continue;
    if (!in.contains(w)) return;  // not all are there yet
    *out.mutable_blob() += in[w];
  }
  out.set_epoch(durable_.epoch());
  out.set_generation(f.generation());
  out.set_index(f.index());
  for (const auto& [worker, blob] : in)
    if (!again || worker == f.worker()) act(SendFence{worker, out});
}

void Coordinator::handle(const PeerLost& e) {
  const auto it = members_.find(e.worker);
  if (it == members_.end() || !it->second.alive) return;
  it->second.lost_ms = now_ms_;
}

void Coordinator::handle(const CommandReceived& e) {
  act(Respond{e.client, answer(e.command)});
}

void Coordinator::handle(const CheckpointsScanned& e) {
  if (!scanning_) return;
  scanning_ = false;
  if (durable_.phase() == pb::Durable::WAITING) plan(e);
}

// ----------------------------------------------------------------- members

bool Coordinator::participates(const std::string& name,
                               uint64_t incarnation) const {
  for (const pb::Durable::Member& p : durable_.participants())
    if (p.name() == name) return p.incarnation() == incarnation;
  return false;
}

bool Coordinator::has_ranks(const std::string& name) const {
  for (const pb::RankPlace& p : durable_.assignment().ranks())
    if (p.worker() == name) return true;
  return false;
}

const Coordinator::Member* Coordinator::live_participant(
    const std::string& name) const {
  const auto it = members_.find(name);
  if (it == members_.end() || !it->second.alive ||
      !participates(name, it->second.report.incarnation()))
    return nullptr;
  return &it->second;
}

bool Coordinator::considers_live(const std::string& worker,
                                 uint64_t incarnation) const {
  const auto it = members_.find(worker);
  return it != members_.end() && it->second.alive &&
         it->second.report.incarnation() == incarnation;
}

bool Coordinator::quiesced(const Member& m) const {
  return m.reported && m.report.generation() == durable_.generation() &&
         m.report.state() == pb::Report::QUIESCED;
}

bool Coordinator::all_quiesced() const {
  for (const pb::Durable::Member& p : durable_.participants()) {
    const Member* m = live_participant(p.name());
    // One without ranks has nothing to end, and may have missed it all.
    if (m != nullptr && has_ranks(p.name()) && !quiesced(*m)) return false;
  }
  return true;
}

bool Coordinator::everybody_heard() const {
  return std::all_of(members_.begin(), members_.end(), [](const auto& m) {
    return !m.second.alive || m.second.reported;
  });
}

bool Coordinator::all_started() const {
  for (const pb::Durable::Member& p : durable_.participants()) {
    const Member* m = live_participant(p.name());
    if (m != nullptr &&
        (!m->reported || m->report.generation() != durable_.generation() ||
         m->report.state() == pb::Report::PREPARED))
      return false;
  }
  return true;
}

void Coordinator::worker_gone(const std::string& name, const Member& m,
                              const std::string& why) {
  const bool expected =
      m.leaving() &&
      !(participates(name, m.report.incarnation()) && has_ranks(name) &&
        durable_.phase() != pb::Durable::WAITING);
  if (!m.alive || terminal(durable_.phase())) return;
  pb::EventRecord e = event(expected ? "worker_left" : "worker_lost");
  e.set_worker(name);
  if (!expected) e.set_cause(why);
  emit(std::move(e));
}

void Coordinator::expire_members() {
  const int64_t dead_after = options_.job.elastic().dead_after_ms();
  for (auto it = members_.begin(); it != members_.end();) {
    Member& m = it->second;
    if (m.alive) {
      const bool quick =
          terminal(durable_.phase()) ||
          (m.leaving() && !participates(it->first, m.report.incarnation()));
      if (now_ms_ - m.heard_ms > dead_after) {
        m.death = fmt::format("silent for {:.1f} s",
                              static_cast<double>(dead_after) / 1000);
      } else if (m.lost_ms >= 0 &&
                 (quick || now_ms_ - m.lost_ms > kLostGraceMs)) {
        m.death = "connection broken: the daemon is dead";
      }
      if (!m.death.empty()) {
        worker_gone(it->first, m, m.death);
        m.alive = false;
        loss_ms_ = now_ms_;
      }
    }
    const bool needed = participates(it->first, m.report.incarnation()) &&
                        durable_.phase() != pb::Durable::WAITING &&
                        !terminal(durable_.phase());
    // A dead participant is kept for its last words until the generation ends.
    if (!m.alive && !needed) {
      it = members_.erase(it);
    } else {
      ++it;
    }
  }
}

// --------------------------------------------------------------- reconcile

void Coordinator::reconcile() {
  if (exited_) return;
  expire_members();
  watch_checkpoints();
  take_metrics();
  watch_hand_over();
  switch (durable_.phase()) {
    case pb::Durable::WAITING:
      reconcile_waiting();
      break;
    case pb::Durable::PREPARING:
      reconcile_preparing();
      break;
    case pb::Durable::RUNNING:
    case pb::Durable::FINISHING:
      reconcile_live();
      break;
    case pb::Durable::ABORTING:
      reconcile_aborting();
      break;
    default:
      break;
  }
  send_directives();
  if (terminal(durable_.phase())) reconcile_ended();
}

void Coordinator::reconcile_waiting() {
  if (durable_.stop_requested() && !stop_needs_save())
    return terminate(pb::Durable::STOPPED, "stopped as asked");
  if (scanning_ || now_ms_ < not_before_ms_) return;
  if (job_finished() && !finish_checked_) {
    // All steps are made; plan() ends the job if their state is saved too.
    finish_checked_ = true;
    scanning_ = true;
    act(ScanCheckpoints{});
    return;
  }
  const auto dealt = deal();
  if (!dealt.ok() && dealt.status().code() == Code::kInvalidArgument &&
      durable_.scale() > 0)
    return release_scale(dealt.status().message());
  if (!dealt.ok() && dealt.status().code() == Code::kInvalidArgument)
    return terminate(pb::Durable::FAILED, dealt.status().message());
  if (!dealt.ok()) {
    gathering_ = true;
    if (waiting_for_ != dealt.status().message()) {
      waiting_for_ = dealt.status().message();
      pb::EventRecord e = event("waiting");
      e.set_detail(waiting_for_);
      emit(std::move(e));
    }
    return;
  }
  // After a fault those who were there go on at once; who comes later makes a
  // planned change.
  const bool all_back = keeps_state() &&
                        durable_.assignment().ranks_size() > 0 &&
                        gone_holders().empty();
  if (gathering_ && !all_back &&
      now_ms_ - last_join_ms_ < options_.job.elastic().join_window_ms())
    return;
  if (keeps_state() && (!inventories_known() || awaits_rejoin())) return;
  scanning_ = true;
  act(ScanCheckpoints{});
}

void Coordinator::reconcile_preparing() {
  std::string why;
  bool must = false;
  if (const auto lost = find_loss()) return begin_abort(*lost);
  if (const std::string lost = lost_source(); !lost.empty())
    return begin_abort(
        {.text = fmt::format("worker {} went with a state to begin with", lost),
         .worker = lost,
         .failure = false});
  const bool wanted = wants_other_mesh(&why, &must);
  if (wanted && must && !durable_.rescue() &&
      !(durable_.stop_requested() && stop_needs_save()))
    return begin_abort({.text = why, .failure = false});
  for (const auto& [name, m] : members_) {
    if (!m.alive) continue;
    if (!m.reported) return;
    const pb::Report& r = m.report;
    // Who came back from silence may still have ranks of an older generation,
    // or start them on an order that is under way, until it is fenced.
    const bool fenced = r.generation() == durable_.generation();
    const bool quiet = live_participant(name) != nullptr
                           ? fenced && r.state() == pb::Report::PREPARED
                           : fenced && !r.busy();
    if (!quiet) return;
  }
  set_phase(pb::Durable::RUNNING);
}

void Coordinator::reconcile_live() {
  for (auto find : {&Coordinator::find_exit, &Coordinator::find_loss,
                    &Coordinator::find_hang})
    if (const auto cause = (this->*find)()) return begin_abort(*cause);
  if (all_quiesced()) return end_generation();
  release_unfit_pin();
  std::string why;
  bool must = false;
  const bool wanted = wants_other_mesh(&why, &must);
  if (durable_.phase() == pb::Durable::RUNNING) {
    // RUN must have reached everybody before FINISH takes its place.
    if (wanted && all_started()) finish_with(why, must);
    return;
  }
  if (must && !durable_.must_stop()) return finish_with(why, true);
  if (!durable_.finish_saves() && everybody_heard() && must_save_to_finish()) {
    durable_.set_finish_saves(true);
    persist();
  }
  // Ranks that could not save go on, unless they must stop.
  bool refused = false;
  for (const auto& [name, m] : members_)
    if (live_participant(name) != nullptr &&
        m.report.generation() == durable_.generation())
      for (const pb::RankStatus& s : m.report.ranks()) {
        if (s.refused_stops() > refused_[s.rank()]) refused = true;
        refused_[s.rank()] = std::max(refused_[s.rank()], s.refused_stops());
      }
  if (refused && !durable_.must_stop()) {
    refused_until_ms_ = now_ms_ + 30'000;
    pb::EventRecord e = event("change_put_off");
    e.set_cause("saving failed: " + checkpoint_error_);
    e.set_detail(durable_.finish_reason());
    emit(std::move(e));
    change_began_ms_ = -1;
    set_phase(pb::Durable::RUNNING);
  }
}

void Coordinator::reconcile_aborting() {
  if (all_quiesced()) end_generation();
}

void Coordinator::reconcile_ended() {
  if (terminal_since_ms_ < 0) terminal_since_ms_ = now_ms_;
  const bool alone = std::none_of(members_.begin(), members_.end(),
                                  [](const auto& m) { return m.second.alive; });
  if (!alone && now_ms_ - terminal_since_ms_ < kGoodbyeMs) return;
  exited_ = true;
  act(Exit{durable_.phase() == pb::Durable::FAILED ? 3 : 0, durable_.cause()});
}

// -------------------------------------------------------------- directives

pb::Directive Coordinator::directive_for(const std::string& name,
                                         const Member& m) const {
  pb::Directive d;
  d.set_generation(durable_.generation());
  d.set_goal(pb::Directive::IDLE);
  const bool part = participates(name, m.report.incarnation());
  if (terminal(durable_.phase())) {
    d.set_goal(pb::Directive::SHUTDOWN);
    d.set_reason(durable_.cause());
  } else if (m.leaving() && !needs_memory_of(name, m) &&
             (!part || !has_ranks(name) ||
              durable_.phase() == pb::Durable::WAITING)) {
    d.set_goal(pb::Directive::LEAVE);
  } else if (part) {
    switch (durable_.phase()) {
      case pb::Durable::PREPARING:
        d.set_goal(pb::Directive::PREPARE);
        *d.mutable_assignment() = durable_.assignment();
        break;
      case pb::Durable::RUNNING:
        d.set_goal(pb::Directive::RUN);
        break;
      case pb::Durable::FINISHING:
        d.set_goal(pb::Directive::FINISH);
        d.set_must_stop(durable_.must_stop());
        d.set_save(durable_.finish_saves());
        break;
      case pb::Durable::ABORTING:
        d.set_goal(pb::Directive::ABORT);
        break;
      default:
        break;
    }
  }
  d.set_checkpoint_request(checkpoint_request_);
  // Only what an earlier life was given is missing; the rest is under way.
  if (durable_.generation() == adopted_generation_ &&
      (d.goal() == pb::Directive::RUN || d.goal() == pb::Directive::FINISH))
    for (const auto& [index, in] : fences_)
      if (has_ranks(name) && !in.contains(name)) d.set_want_fences(true);
  return d;
}

void Coordinator::send_directives() {
  constexpr int64_t kResendMs = 250;
  for (auto& [name, m] : members_) {
    if (!m.alive || !m.reported) continue;
    pb::Directive d = directive_for(name, m);
    const std::string key =
        fmt::format("{}/{}/{}/{}/{}/{}/{}", m.report.incarnation(),
                    d.generation(), static_cast<int>(d.goal()), d.must_stop(),
                    d.save(), d.checkpoint_request(), d.want_fences());
    if (key == m.directive_key && now_ms_ - m.directive_ms < kResendMs)
      continue;
    m.directive_key = key;
    m.directive_ms = now_ms_;
    d.set_epoch(durable_.epoch());
    d.set_seq(++directive_seq_);
    d.set_worker(name);
    d.set_incarnation(m.report.incarnation());
    d.set_metrics_acked(last_finished_);
    d.set_report_every_ms(options_.job.elastic().report_every_ms());
    d.set_dead_after_ms(options_.job.elastic().dead_after_ms());
    d.set_job(options_.job.job().name());
    if (keeps_state()) d.set_state_job(durable_.state_job());
    m.sent_away = m.sent_away || d.goal() == pb::Directive::LEAVE;
    act(SendDirective{std::move(d)});
  }
}

// ------------------------------------------------------------------ common

void Coordinator::set_phase(pb::Durable::Phase phase) {
  durable_.set_phase(phase);
  phase_since_ms_ = now_ms_;
  persist();
}

pb::EventRecord Coordinator::event(const std::string& name) const {
  pb::EventRecord e;
  e.set_time(options_.unix_offset_s + static_cast<double>(now_ms_) / 1000);
  e.set_generation(durable_.generation());
  e.set_event(name);
  e.set_step(last_finished_);
  return e;
}

void Coordinator::emit(pb::EventRecord record) {
  events_.push_back(record);
  if (events_.size() > kKeptEvents) events_.pop_front();
  act(EmitEvent{std::move(record)});
}

void Coordinator::terminate(pb::Durable::Phase phase, const std::string& why) {
  durable_.set_cause(why);
  durable_.clear_participants();
  durable_.clear_assignment();
  set_phase(phase);
  pb::EventRecord e = event(phase == pb::Durable::DONE     ? "job_done"
                            : phase == pb::Durable::FAILED ? "job_failed"
                                                           : "job_stopped");
  if (phase == pb::Durable::FAILED) e.set_cause(why);
  emit(std::move(e));
  terminal_since_ms_ = now_ms_;
}

}  // namespace remesh::core
