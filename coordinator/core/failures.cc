// How generations end: noticing, naming and counting failures.
#include <fmt/format.h>

#include <algorithm>

#include "coordinator/core/coordinator.h"

namespace remesh::core {
namespace {

constexpr int64_t kAutoHangMs = 10'000;      // least, once steps are made
constexpr int64_t kStartHangMs = 120'000;    // before the first step
constexpr int64_t kSetStartHangMs = 30'000;  // same, hang_after_s given
constexpr int64_t kSilentReports = 5;
constexpr int64_t kFirstBackoffMs = 250;
constexpr int64_t kMaxBackoffMs = 30'000;

// Exit codes of remesh-trainer (worker/board/board.h), which this library may
// not include.
constexpr int kExitCannotContinue = 3;
constexpr int kExitBadSource = 65;

}  // namespace

std::vector<RankView> Coordinator::rank_views() const {
  std::vector<RankView> out;
  for (const auto& [name, m] : members_) {
    if (!m.reported || m.report.generation() != durable_.generation() ||
        !participates(name, m.report.incarnation()))
      continue;
    for (const pb::RankStatus& s : m.report.ranks()) {
      const auto it = m.progress.find(s.rank());
      const int64_t since =
          it == m.progress.end()
              ? now_ms_
              : std::max(it->second.since_ms, phase_since_ms_);
      out.push_back({.status = &s,
                     .worker = name,
                     .host = m.report.host(),
                     .stood_ms = now_ms_ - since});
    }
  }
  return out;
}

std::optional<Coordinator::Cause> Coordinator::find_exit() const {
  const std::vector<RankView> ranks = rank_views();
  const auto first = first_death(ranks);
  if (!first) return std::nullopt;
  const pb::RankStatus& s = *ranks[*first].status;
  return Cause{.text = death_text(ranks[*first]),
               .rank = s.rank(),
               .worker = ranks[*first].worker,
               .step = s.step(),
               .exit_time = s.exit_time(),
               .by_signal = died_of_itself(s),
               .exit_code = s.signal() != 0 ? 0 : s.exit_code()};
}

// A participant that is dead, or lives a new life. Without ranks it matters
// only while the generation is being prepared, and then no more than a dead
// one does.
std::optional<Coordinator::Cause> Coordinator::find_loss() const {
  for (const pb::Durable::Member& p : durable_.participants()) {
    if (live_participant(p.name()) != nullptr || !has_ranks(p.name())) continue;
    const auto it = members_.find(p.name());
    const bool here = it != members_.end();
    std::string why = "gone";
    if (here && it->second.report.incarnation() != p.incarnation())
      why = "its daemon was restarted";
    else if (here && !it->second.death.empty())
      why = it->second.death;
    Cause c{.text = fmt::format("worker {} on {}: {}", p.name(), p.host(), why),
            .worker = p.name()};
    return c;
  }
  return std::nullopt;
}

int64_t Coordinator::silent_ms() const {
  return kSilentReports * options_.job.elastic().report_every_ms();
}

int64_t Coordinator::hang_after_ms() const {
  const double set_s = options_.job.elastic().hang_after_s();
  if (set_s > 0) {
    const auto ms = static_cast<int64_t>(set_s * 1000);
    return steps_in_generation_ > 0 ? ms : std::max(ms, kSetStartHangMs);
  }
  if (steps_in_generation_ == 0 || step_times_.empty()) return kStartHangMs;
  std::vector<double> t(step_times_.begin(), step_times_.end());
  std::nth_element(t.begin(), t.begin() + t.size() / 2, t.end());
  return std::max(kAutoHangMs, static_cast<int64_t>(10'000 * t[t.size() / 2]));
}

// Every rank stands when one does; cause.h tells the culprit.
std::optional<Coordinator::Cause> Coordinator::find_hang() const {
  const int64_t limit = hang_after_ms();
  bool hung = false;
  for (const auto& [name, m] : members_) {
    if (live_participant(name) == nullptr) continue;
    // A silent daemon may hide what the others wait for; it will be heard or
    // taken for dead.
    if (has_ranks(name) && (!m.reported || now_ms_ - m.heard_ms > silent_ms()))
      return std::nullopt;
    if (m.report.generation() != durable_.generation()) continue;
    for (const pb::RankStatus& s : m.report.ranks()) {
      const auto it = m.progress.find(s.rank());
      if (s.exited() || it == m.progress.end()) continue;
      const int64_t since = std::max(it->second.since_ms, phase_since_ms_);
      // A silent daemon says nothing about its ranks.
      if (m.heard_ms - since > limit) hung = true;
    }
  }
  if (!hung) return std::nullopt;
  std::vector<RankView> ranks = rank_views();
  std::erase_if(ranks, [](const RankView& r) { return r.status->exited(); });
  const Stuck stuck = find_stuck(ranks);
  const RankView& r = ranks[stuck.rank];
  Cause cause{.text = stuck_text(ranks, stuck), .step = r.status->step()};
  if (stuck.lost_message) return cause;  // of nobody's doing
  cause.rank = r.status->rank();
  cause.worker = r.worker;
  return cause;
}

void Coordinator::begin_abort(const Cause& cause) {
  cause_ = cause;
  if (change_began_ms_ < 0) change_began_ms_ = now_ms_;
  durable_.set_cause(cause.text);
  durable_.set_cause_rank(cause.rank);
  durable_.set_cause_worker(cause.worker);
  set_phase(pb::Durable::ABORTING);
}

// Reports that came during the abort may tell an earlier cause than the one
// that was noticed first: victims of a death can be heard before it is.
Coordinator::Cause Coordinator::settled_cause() const {
  if (!cause_->failure || cause_->by_signal) return *cause_;
  const auto exit = find_exit();
  if (exit && exit->by_signal) return *exit;
  if (const auto loss = find_loss()) return *loss;
  if (exit && cause_->exit_code != 0) return *exit;
  return *cause_;
}

void Coordinator::end_generation() {
  const bool aborted = durable_.phase() == pb::Durable::ABORTING;
  if (aborted && cause_ && cause_->failure) {
    const Cause cause = settled_cause();
    cause_ = cause;
    durable_.set_cause(cause.text);
    pb::EventRecord e = event("failure");
    e.set_cause(cause.text);
    e.set_worker(cause.worker);
    if (cause.rank >= 0) e.set_rank(cause.rank);
    for (const RankView& r : rank_views())
      if (r.status->rank() == cause.rank && r.worker == cause.worker)
        fill_failure(r, &e);
    for (const pb::Durable::Member& p : durable_.participants())
      if (p.name() == cause.worker && !e.has_host()) e.set_host(p.host());
    e.set_seconds(static_cast<double>(now_ms_ - change_began_ms_) / 1000);
    emit(std::move(e));
  } else if (!aborted) {
    pb::EventRecord e = event("generation_ended");
    e.set_detail(durable_.finish_reason().empty() ? "all ranks finished"
                                                  : durable_.finish_reason());
    emit(std::move(e));
    if (change_began_ms_ < 0) change_began_ms_ = now_ms_;
  }
  fences_.clear();
  refused_.clear();
  steps_in_generation_ = 0;
  durable_.clear_participants();
  durable_.clear_finish_reason();
  durable_.set_must_stop(false);
  gathering_ = false;
  if (aborted && cause_ && cause_->failure) account_failure();
  cause_.reset();
  if (durable_.phase() == pb::Durable::FAILED) return;
  // Ranks end in order at the last step only after they saved it.
  if (!aborted && job_finished()) return terminate(pb::Durable::DONE, "");
  finish_checked_ = false;
  set_phase(pb::Durable::WAITING);
  reconcile_waiting();
}

void Coordinator::account_failure() {
  const Cause& c = *cause_;
  const auto& elastic = options_.job.elastic();
  durable_.set_failures(durable_.failures() + 1);
  const bool same = c.rank >= 0 && durable_.last_failure_rank() == c.rank &&
                    durable_.last_failure_step() == c.step;
  durable_.set_same_failures(same ? durable_.same_failures() + 1 : 1);
  durable_.set_last_failure_rank(c.rank);
  durable_.set_last_failure_step(c.step);
  if (c.exit_code == kExitBadSource) {
    refuse_source();
    durable_.set_same_failures(0);  // the next source is another one
  }
  if (c.exit_code == kExitCannotContinue)
    return terminate(pb::Durable::FAILED, c.text);
  if (c.rank >= 0 && durable_.same_failures() >= elastic.max_same_failures())
    return terminate(pb::Durable::FAILED,
                     fmt::format("the same failure {} times at step {}: {}",
                                 durable_.same_failures(), c.step, c.text));
  if (durable_.failures() >= elastic.max_failures_without_progress())
    return terminate(
        pb::Durable::FAILED,
        fmt::format("{} failures in a row without a finished step, last: {}",
                    durable_.failures(), c.text));
  if (durable_.failures() >= 3)
    not_before_ms_ =
        now_ms_ + std::min(kMaxBackoffMs, kFirstBackoffMs << std::min<int64_t>(
                                              durable_.failures() - 3, 10));
}

}  // namespace remesh::core
