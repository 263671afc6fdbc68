#include "coordinator/core/failure_detector.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "coordinator/core/durable.h"
#include "coordinator/core/recovery.h"
#include "proto/base/exit_code.h"
#include "proto/base/median.h"
#include "proto/base/text.h"

namespace remesh::core {
namespace {

constexpr int64_t kAutoHangMs = 10'000;      // at least, once steps were made
constexpr int64_t kAutoHangSteps = 10;       // median step times
constexpr int64_t kStartHangMs = 120'000;    // before the first step
constexpr int64_t kSetStartHangMs = 30'000;  // the same, with hang_after_s set
constexpr int64_t kSilentReports = 5;
constexpr size_t kKeptStepTimes = 101;

// ", between the hosts a and b".
std::string links_text(const pb::Cause& f) {
  std::set<std::string> hosts(f.between().begin(), f.between().end());
  hosts.insert(f.links().begin(), f.links().end());
  if (hosts.empty()) return "";
  if (f.links_size() == 2)
    return fmt::format(", between the hosts {} and {}", f.links(0), f.links(1));
  return ", between two of the hosts " + join({hosts.begin(), hosts.end()});
}

void add_once(const std::string& name,
              google::protobuf::RepeatedPtrField<std::string>* to) {
  if (std::ranges::find(*to, name) == to->end()) *to->Add() = name;
}

void add_place(const RankView& r, pb::Cause* f) {
  add_once(r.worker, f->mutable_workers());
  add_once(r.host, f->mutable_hosts());
}

// No host is to blame alone, but a link between two of these.
void put_between(const std::set<std::string>& hosts, pb::Cause* f) {
  if (hosts.size() < 2) return;
  (hosts.size() == 2 ? f->mutable_links() : f->mutable_between())
      ->Assign(hosts.begin(), hosts.end());
}

// What failed, where, and how far into the generation that rank was.
pb::Cause failure_of(const RankView& r, const std::string& what,
                     const pb::Durable& d) {
  const pb::RankStatus& s = *r.status;
  pb::Cause f = cause_of(what);
  f.set_subject(rank_name(r));
  f.set_rank(s.rank());
  f.set_worker(r.worker);
  f.set_step(s.step());
  add_place(r, &f);
  f.set_at_start(s.committed_step() <= d.assignment().source().step());
  f.set_before_training(f.at_start() && s.phase() < pb::RankStatus::COMPUTE);
  return f;
}

void put_worker(const std::string& worker, const std::string& host,
                pb::Cause* f) {
  f->set_subject(fmt::format("worker {} on {}", worker, host));
  f->set_worker(worker);
  f->add_workers(worker);
}

bool any_exited(const pb::Report& r) {
  return std::ranges::any_of(r.ranks(),
                             [](const auto& s) { return s.exited(); });
}

bool is_silent(const Roster::Member* m) {
  return m != nullptr && !m->alive && m->disconnected_ms < 0;
}

bool other_host_is_silent(const ClusterView& view, const std::string& host) {
  const auto& all = view.durable.participants();
  return std::ranges::any_of(all, [&](const auto& p) {
    const Roster::Member* m = view.roster.find(p.name());
    return p.host() != host && is_silent(m) &&
           m->report.incarnation() == p.incarnation();
  });
}

}  // namespace

std::vector<RankView> rank_views(const ClusterView& view) {
  std::vector<RankView> out;
  for (const auto& [name, m] : view.roster.members()) {
    if (!m.reported || m.report.generation() != view.durable.generation() ||
        !participates(view.durable, name, m.report.incarnation()))
      continue;
    for (const pb::RankStatus& s : m.report.ranks()) {
      const auto it = m.progress.find(s.rank());
      const bool known = it != m.progress.end();
      const int64_t since =
          known ? std::max(it->second.since_ms, view.phase_since_ms)
                : view.now_ms;
      out.push_back({.status = &s,
                     .worker = name,
                     .host = m.report.host(),
                     .stalled_ms = view.now_ms - since,
                     .exit_seen_ms = known ? it->second.exited_ms : 0});
    }
  }
  return out;
}

bool killed_by_worker(const ClusterView& view) {
  return std::ranges::any_of(rank_views(view), [](const RankView& r) {
    return r.status->killed_by_worker();
  });
}

void FailureDetector::note_step(double seconds) {
  has_stepped_ = true;
  step_times_.push_back(seconds);
  if (step_times_.size() > kKeptStepTimes) step_times_.pop_front();
}

std::optional<pb::Cause> FailureDetector::find(const ClusterView& view) const {
  if (auto failure = find_exit(view)) return failure;
  if (auto failure = find_lost_worker(view)) return failure;
  return find_hang(view);
}

std::optional<pb::Cause> FailureDetector::find_exit(
    const ClusterView& view) const {
  const auto& members = view.roster.members();
  if (std::ranges::none_of(
          members, [](const auto& m) { return any_exited(m.second.report); }))
    return std::nullopt;
  const std::vector<RankView> ranks = rank_views(view);
  const auto first = first_death(ranks);
  if (!first) return std::nullopt;
  const RankView& dead = ranks[*first];
  const pb::RankStatus& s = *dead.status;
  pb::Cause f = failure_of(dead, death_text(dead), view.durable);
  f.set_by_signal(died_of_itself(s));
  if (s.signal() == 0) f.set_exit_code(s.exit_code());
  set_links(broken_link(ranks, dead), &f);
  if (f.links().empty())
    put_between(unconnected_hosts(view.durable.assignment(), dead), &f);
  if (!f.links().empty() || !f.between().empty()) {  // no host is to blame
    f.mutable_what()->append(links_text(f));
    f.clear_hosts();
    f.clear_workers();
    return f;
  }
  for (const RankView& r : ranks)
    if (died_like(*r.status, s)) add_place(r, &f);
  return f;
}

std::optional<pb::Cause> FailureDetector::find_lost_worker(
    const ClusterView& view) const {
  const pb::Durable& d = view.durable;
  for (const pb::Durable::Member& p : d.participants()) {
    if (view.roster.considers_live(p.name(), p.incarnation()) ||
        !has_ranks(d, p.name()))
      continue;
    const Roster::Member* m = view.roster.find(p.name());
    // It only delayed the end.
    if (m != nullptr && m->given_up && d.phase() == pb::Durable::ABORTING)
      continue;
    std::string why = "lost";
    if (m != nullptr && m->report.incarnation() != p.incarnation())
      why = "its daemon was restarted";
    else if (m != nullptr && !m->death.empty())
      why = m->death;
    pb::Cause f = cause_of(why);
    put_worker(p.name(), p.host(), &f);
    f.set_at_start(!has_stepped_);
    f.set_before_training(!has_stepped_);
    f.set_silent(is_silent(m));
    // Several hosts at once: the network between them and the coordinator.
    if (!f.silent() || !other_host_is_silent(view, p.host()))
      f.add_hosts(p.host());
    return f;
  }
  return std::nullopt;
}

int64_t FailureDetector::silent_ms() const {
  return kSilentReports * elastic_.report_every_ms();
}

int64_t FailureDetector::hang_after_ms(const ClusterView& view) const {
  // Before the first step, unless it is known that messages may be lost.
  const auto& suspects = view.durable.host_faults().suspects();
  const bool doubtful = view.durable.host_faults().has_link_search() ||
                        std::ranges::any_of(suspects, [](const pb::Cordon& c) {
                          return !c.peer().empty();
                        });
  if (elastic_.hang_after_s() > 0) {
    const auto ms = static_cast<int64_t>(elastic_.hang_after_s() * 1000);
    return has_stepped_ ? ms : std::max(ms, kSetStartHangMs);
  }
  if (!has_stepped_ || step_times_.empty())
    return doubtful ? kSetStartHangMs : kStartHangMs;
  const double typical = median({step_times_.begin(), step_times_.end()});
  return std::max(kAutoHangMs,
                  static_cast<int64_t>(1000 * kAutoHangSteps * typical));
}

// When one rank hangs, all ranks stall. Some may stall for long without one, as
// for a rank that reads from a slow disk, or for their turn to get a state.
std::optional<pb::Cause> FailureDetector::find_hang(
    const ClusterView& view) const {
  const pb::Durable& d = view.durable;
  const int64_t limit = hang_after_ms(view);
  bool hung = false;
  for (const auto& [name, m] : view.roster.members()) {
    if (!m.alive || !participates(d, name, m.report.incarnation())) continue;
    // A silent daemon may hide what the others wait for. It will report or be
    // declared dead.
    if ((!m.reported || view.now_ms - m.heard_ms > silent_ms()) &&
        has_ranks(d, name))
      return std::nullopt;
    if (m.report.generation() != d.generation()) continue;
    for (const pb::RankStatus& s : m.report.ranks()) {
      const auto it = m.progress.find(s.rank());
      if (s.exited() || it == m.progress.end()) continue;
      const int64_t since = std::max(it->second.since_ms, view.phase_since_ms);
      // Up to the last report, not up to now.
      if (m.heard_ms - since <= limit) return std::nullopt;
      hung = true;
    }
  }
  if (!hung) return std::nullopt;
  std::vector<RankView> ranks = rank_views(view);
  std::erase_if(ranks, [](const RankView& r) { return r.status->exited(); });
  const Stuck stuck = find_stuck(ranks);
  const RankView& r = ranks[stuck.rank];
  pb::Cause failure = stuck.lost_message
                          ? cause_of(stuck_text(ranks, stuck))
                          : failure_of(r, stuck_text(ranks, stuck), d);
  failure.set_hung(true);
  if (stuck.lost_message) {  // no rank is to blame
    failure.set_step(r.status->step());
    set_links(silent_links(ranks, stuck), &failure);
    put_between(silent_hosts(ranks, stuck), &failure);
    failure.set_at_start(!has_stepped_);
    failure.set_before_training(!has_stepped_);
    failure.mutable_what()->append(links_text(failure));
    return failure;
  }
  for (const RankView& other : ranks)
    if (other.stalled_ms > limit && !other.status->waits() &&
        other.status->os_state() == r.status->os_state())
      add_place(other, &failure);
  return failure;
}

std::optional<pb::Cause> FailureDetector::find_unprepared(
    const ClusterView& view, bool adopted, bool forgiving) const {
  if (auto lost = find_lost_worker(view)) return lost;
  const pb::Durable& d = view.durable;
  if (const auto ahead = view.roster.started_early(d, adopted && !forgiving);
      !ahead.empty())
    return change_of_plan(fmt::format(
        "worker {} has started generation {}, which the journal only prepares",
        ahead, d.generation()));
  const std::string worker = lost_source(view, forgiving);
  if (worker.empty()) return std::nullopt;
  const std::string what = "lost a state that the generation starts from";
  const Roster::Member* m = view.roster.find_alive(worker);
  if (adopted || m == nullptr ||
      !participates(d, worker, m->report.incarnation()))
    return change_of_plan(fmt::format("worker {} {}", worker, what));
  // The same process said that it has it, and may say so again and again.
  pb::Cause f = cause_of(what);
  put_worker(worker, m->report.host(), &f);
  f.add_hosts(m->report.host());
  f.set_at_start(true);
  f.set_before_training(true);
  return f;
}

std::optional<pb::Cause> FailureDetector::find_ended_before(
    const ClusterView& view) const {
  const pb::Durable& d = view.durable;
  for (const auto& [name, m] : view.roster.members()) {
    const pb::Report& r = m.report;
    if (view.roster.live_participant(d, name) != nullptr && m.reported &&
        has_ranks(d, name) && r.generation() == d.generation() && !r.busy() &&
        r.state() == pb::Report::IDLE)
      return change_of_plan(fmt::format(
          "worker {} has ended generation {}, which the journal says runs",
          name, d.generation()));
  }
  return std::nullopt;
}

pb::Cause FailureDetector::settle(const pb::Cause& noticed,
                                  const ClusterView& view) const {
  if (noticed.planned() || noticed.by_signal()) return noticed;
  const auto exit = find_exit(view);
  if (exit && exit->by_signal()) return *exit;
  if (const auto loss = find_lost_worker(view)) return *loss;
  if (exit && noticed.exit_code() != 0) return *exit;
  return noticed;
}

bool FailureDetector::source_fate_known(const ClusterView& view) const {
  const pb::Cause cause = settle(view.durable.cause(), view);
  return cause.exit_code() != kExitBadSource || holders_answered(view);
}

}  // namespace remesh::core
