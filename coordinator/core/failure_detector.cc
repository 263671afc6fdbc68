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
std::string links_text(const Failure& f) {
  std::set<std::string> hosts = f.between;
  for (const auto& [a, b] : f.links) hosts.insert({a, b});
  if (hosts.empty()) return "";
  if (f.links.size() == 1)
    return fmt::format(", between the hosts {} and {}", f.links[0].first,
                       f.links[0].second);
  return ", between two of the hosts " + join({hosts.begin(), hosts.end()});
}

void add_place(const RankView& r, Failure* f) {
  f->workers.insert(r.worker);
  if (std::find(f->hosts.begin(), f->hosts.end(), r.host) == f->hosts.end())
    f->hosts.push_back(r.host);
}

// No host is to blame alone, but a link between two of these.
void put_between(std::set<std::string> hosts, Failure* f) {
  if (hosts.size() == 2)
    f->links = {{*hosts.begin(), *hosts.rbegin()}};
  else if (hosts.size() > 2)
    f->between = std::move(hosts);
}

// Where and how far into the generation the rank failed.
void locate(const RankView& r, const pb::Durable& d, Failure* f) {
  const pb::RankStatus& s = *r.status;
  f->hosts = {r.host};
  f->workers = {r.worker};
  f->at_start = s.committed_step() <= d.assignment().source().step();
  f->before_training = f->at_start && s.phase() < pb::RankStatus::COMPUTE;
}

bool any_exited(const pb::Report& r) {
  return std::any_of(r.ranks().begin(), r.ranks().end(),
                     [](const auto& s) { return s.exited(); });
}

bool is_silent(const Roster::Member* m) {
  return m != nullptr && !m->alive && m->disconnected_ms < 0;
}

bool other_host_is_silent(const ClusterView& view, const std::string& host) {
  const auto& all = view.durable.participants();
  return std::any_of(all.begin(), all.end(), [&](const auto& p) {
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

void FailureDetector::note_step(double seconds) {
  has_stepped_ = true;
  step_times_.push_back(seconds);
  if (step_times_.size() > kKeptStepTimes) step_times_.pop_front();
}

std::optional<Failure> FailureDetector::find(const ClusterView& view) const {
  if (auto failure = find_exit(view)) return failure;
  if (auto failure = find_lost_worker(view)) return failure;
  return find_hang(view);
}

std::optional<Failure> FailureDetector::find_exit(
    const ClusterView& view) const {
  const auto& members = view.roster.members();
  if (std::none_of(members.begin(), members.end(),
                   [](const auto& m) { return any_exited(m.second.report); }))
    return std::nullopt;
  const std::vector<RankView> ranks = rank_views(view);
  const auto first = first_death(ranks);
  if (!first) return std::nullopt;
  const pb::RankStatus& s = *ranks[*first].status;
  Failure f{.subject = rank_name(ranks[*first]),
            .what = death_text(ranks[*first]),
            .rank = s.rank(),
            .worker = ranks[*first].worker,
            .step = s.step(),
            .by_signal = died_of_itself(s),
            .exit_code = s.signal() != 0 ? 0 : s.exit_code()};
  locate(ranks[*first], view.durable, &f);
  f.links = broken_link(ranks, ranks[*first]);
  if (f.links.empty()) put_between(unconnected_hosts(ranks, ranks[*first]), &f);
  if (!f.links.empty() || !f.between.empty()) {  // no host is to blame
    f.what += links_text(f);
    f.hosts.clear();
    f.workers.clear();
    return f;
  }
  for (const RankView& r : ranks)
    if (died_like(*r.status, s)) add_place(r, &f);
  return f;
}

std::optional<Failure> FailureDetector::find_lost_worker(
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
    Failure f{.subject = fmt::format("worker {} on {}", p.name(), p.host()),
              .what = why,
              .worker = p.name(),
              .hosts = {p.host()},
              .workers = {p.name()},
              .at_start = !has_stepped_,
              .before_training = !has_stepped_,
              .silent = is_silent(m)};
    // Several hosts at once: the network between them and the coordinator.
    if (f.silent && other_host_is_silent(view, p.host())) f.hosts.clear();
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
  const bool doubtful =
      view.durable.host_faults().has_link_search() ||
      std::any_of(suspects.begin(), suspects.end(),
                  [](const pb::Cordon& c) { return !c.peer().empty(); });
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
std::optional<Failure> FailureDetector::find_hang(
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
  Failure failure{
      .what = stuck_text(ranks, stuck), .step = r.status->step(), .hung = true};
  if (stuck.lost_message) {  // no rank is to blame
    failure.links = silent_links(ranks, stuck);
    put_between(silent_hosts(ranks, stuck), &failure);
    failure.at_start = failure.before_training = !has_stepped_;
    failure.what += links_text(failure);
    return failure;
  }
  failure.subject = rank_name(r);
  failure.rank = r.status->rank();
  failure.worker = r.worker;
  locate(r, d, &failure);
  for (const RankView& other : ranks)
    if (other.stalled_ms > limit && !other.status->waits() &&
        other.status->os_state() == r.status->os_state())
      add_place(other, &failure);
  return failure;
}

std::optional<Failure> FailureDetector::find_unprepared(const ClusterView& view,
                                                        bool adopted,
                                                        bool forgiving) const {
  if (auto lost = find_lost_worker(view)) return lost;
  const pb::Durable& d = view.durable;
  if (const auto ahead = view.roster.started_early(d, adopted && !forgiving);
      !ahead.empty())
    return Failure{.what = fmt::format("worker {} has started generation {}, "
                                       "which the journal only prepares",
                                       ahead, d.generation()),
                   .is_fault = false};
  const std::string worker = lost_source(view, forgiving);
  if (worker.empty()) return std::nullopt;
  return Failure{.what = fmt::format("worker {} has lost a state that the "
                                     "generation starts from",
                                     worker),
                 .worker = worker,
                 .is_fault = false};
}

std::optional<Failure> FailureDetector::find_ended_before(
    const ClusterView& view) const {
  const pb::Durable& d = view.durable;
  for (const auto& [name, m] : view.roster.members()) {
    const pb::Report& r = m.report;
    if (view.roster.live_participant(d, name) != nullptr && m.reported &&
        has_ranks(d, name) && r.generation() == d.generation() && !r.busy() &&
        r.state() == pb::Report::IDLE)
      return Failure{.what = fmt::format("worker {} has ended generation {}, "
                                         "which the journal says runs",
                                         name, d.generation()),
                     .is_fault = false};
  }
  return std::nullopt;
}

Failure FailureDetector::settle(const Failure& noticed,
                                const ClusterView& view) const {
  if (!noticed.is_fault || noticed.by_signal) return noticed;
  const auto exit = find_exit(view);
  if (exit && exit->by_signal) return *exit;
  if (const auto loss = find_lost_worker(view)) return *loss;
  if (exit && noticed.exit_code != 0) return *exit;
  return noticed;
}

bool FailureDetector::source_fate_known(const ClusterView& view) const {
  const Failure cause = settle(failure_of(view.durable.cause()), view);
  return cause.exit_code != kExitBadSource || holders_answered(view);
}

}  // namespace remesh::core
