#include "coordinator/core/roster.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "coordinator/core/drains.h"
#include "coordinator/core/durable.h"
#include "coordinator/core/job_shape.h"
#include "proto/base/text.h"
#include "proto/limits/plausible.h"

namespace remesh::core {
namespace {

// It can be given no rank, so it has nothing to prepare.
bool offers_nothing(const pb::Report& r) { return r.slots() < 1 && !r.busy(); }

// Fenced, with no rank alive, and able to say what it holds.
bool is_free(const pb::Report& r, const pb::Durable& d) {
  return r.generation() == d.generation() && !r.busy() &&
         (d.state_job() == 0 || r.has_inventory());
}

}  // namespace

bool Roster::Member::inventory_known(int64_t generation) const {
  return reported && report.has_inventory() && !report.busy() &&
         report.generation() == generation &&
         (report.state() == pb::Report::IDLE ||
          report.state() == pb::Report::QUIESCED);
}

bool Roster::Member::quiesced(int64_t generation) const {
  return reported && report.generation() == generation &&
         report.state() == pb::Report::QUIESCED;
}

std::optional<std::string> Roster::Member::awaited(
    const pb::Durable& d, const std::string& name) const {
  const pb::Report& r = report;
  const bool fenced = r.generation() == d.generation();
  if (!reported || offers_nothing(r)) return {};
  const auto part = [&] { return participates(d, name, r.incarnation()); };
  switch (d.phase()) {
    case pb::Durable::WAITING:
      if (d.state_job() == 0 || sent_away || inventory_known(d.generation()))
        return {};
      return r.busy() ? "end its ranks" : "list its states";
    case pb::Durable::PREPARING: {
      // A worker that returns from silence may still have ranks of an older
      // generation, or start them on a directive in flight, until it is fenced.
      const bool quiet = part() ? fenced && r.state() == pb::Report::PREPARED
                                : fenced && !r.busy();
      if (!quiet) return r.busy() ? "end its older ranks" : "prepare";
      const bool unlisted =
          !r.has_inventory() && is_in_memory_of(d.assignment().source(), name);
      if (unlisted) return "list its states";
      return {};
    }
    case pb::Durable::RUNNING:
      if ((!fenced || r.state() == pb::Report::PREPARED) && part())
        return "start";
      [[fallthrough]];
    case pb::Durable::FINISHING:
      if (fenced && r.ranks_size() > 0 && !quiesced(d.generation()) &&
          std::ranges::all_of(r.ranks(),
                              [](const auto& s) { return s.exited(); }) &&
          part())
        return "clean up after its ranks";
      return {};
    case pb::Durable::ABORTING:
      if (quiesced(d.generation()) || !part() || !has_ranks(d, name)) return {};
      return "end its ranks";
    default:
      return {};
  }
}

// ----------------------------------------------------------------- changes

void Roster::adopt(const pb::Durable& durable, int64_t until_ms) {
  for (const pb::Durable::Member& p : durable.participants()) {
    Member m;
    m.report.set_worker(p.name());
    m.report.set_incarnation(p.incarnation());
    m.report.set_host(p.host());
    m.report.set_host_id(p.host_id());
    m.report.set_slots(p.slots());
    m.report.set_cores(p.cores());
    m.report.set_memory_bytes(p.memory_bytes());
    m.draining = drains(durable.drains(), p.name(), p.incarnation());
    m.heard_ms = until_ms;
    members_[p.name()] = m;
  }
}

std::optional<Roster::Changes> Roster::on_report(const pb::Report& r,
                                                 const pb::Durable& durable,
                                                 int64_t silent_ms,
                                                 int64_t now_ms) {
  if (judge(r, now_ms) != Verdict::kTaken) return std::nullopt;
  auto it = members_.find(r.worker());
  const bool known = it != members_.end();
  if (newest_.size() >= 2 * limits::kMaxWorkers)  // names of the dead
    std::erase_if(newest_,
                  [&](const auto& n) { return !members_.contains(n.first); });
  Newest& newest = newest_[r.worker()];
  if (newest.incarnation != r.incarnation()) newest.since_ms = now_ms;
  newest.incarnation = r.incarnation();
  newest.seq = r.seq();
  newest.gone_ms = -1;
  Changes changes;
  if (isolated_)
    changes.push_back({.kind = MembershipChange::Kind::kReconnected,
                       .detail = fmt::format(
                           "after {} s", (now_ms - last_heard_ms()) / 1000)});
  if (cut_off_) note_heard(now_ms);
  if (known && r.incarnation() != it->second.report.incarnation()) {
    // A later incarnation proves the earlier one dead.
    if (it->second.alive)
      changes.push_back(lost(r.worker(), it->second, "restarted"));
    it = members_.end();
  }
  const bool back = it != members_.end() && !it->second.alive &&
                    (!it->second.given_up || is_free(r, durable));
  if (it == members_.end() || back) {
    if (it == members_.end())
      it = members_.insert_or_assign(r.worker(), Member{}).first;
    it->second.draining = drains(durable.drains(), r.worker(), r.incarnation());
    it->second.alive = true;
    it->second.joined_ms = now_ms;
    it->second.death.clear();
    it->second.given_up = false;
    it->second.awaited_since_ms = -1;
    if (!offers_nothing(r)) last_join_ms_ = now_ms;
    changes.push_back({.kind = back ? MembershipChange::Kind::kReturned
                                    : MembershipChange::Kind::kJoined,
                       .worker = r.worker(),
                       .detail = fmt::format(
                           "{} on {}", plural(r.slots(), "slot"), r.host())});
  }
  Member& m = it->second;
  if (r.leaving() && !std::exchange(m.leave_announced, true))
    changes.push_back(
        {.kind = MembershipChange::Kind::kLeaving, .worker = r.worker()});
  const int64_t gap = now_ms - m.heard_ms;
  if (gap > silent_ms)
    for (auto& [rank, p] : m.progress) p.since_ms += gap - silent_ms;
  if (m.progress.size() > 2 * limits::kMaxSlots) m.progress.clear();
  for (const pb::RankStatus& s : r.ranks()) {
    Progress& p = m.progress[s.rank()];
    if (!m.reported || p.since_ms == 0 || p.value != s.progress() ||
        m.report.generation() != r.generation())
      p = {s.progress(), now_ms, p.exited_ms};
    if (s.exited() && p.exited_ms == 0) p.exited_ms = now_ms;
  }
  m.take(r, now_ms);
  unreached_.erase(r.worker());
  return changes;
}

void Roster::Member::take(const pb::Report& newest, int64_t now_ms) {
  if (!hardware_known) {
    hardware_known = newest.has_hardware() || newest.has_hardware_error();
    if (newest.has_hardware()) core = core_from(newest.hardware());
  }
  report = newest;
  reported = true;
  ++reports_in_phase;
  heard_ms = now_ms;
  disconnected_ms = -1;
  cut_off = false;
  revoked.clear();
}

std::string Roster::host_of(const pb::Report& r) const {
  const uint64_t id = r.host_id();
  const Member* m = find(r.worker());
  if (m != nullptr && m->report.host_id() == id &&
      m->report.incarnation() == r.incarnation())
    return m->report.host();
  const std::string own = fmt::format("{}-{:08x}", r.host(), id & 0xffffffff);
  bool taken = false;
  for (const auto& [name, other] : members_) {
    const pb::Report& o = other.report;
    if (o.host_id() == id && (o.host() == r.host() || o.host() == own))
      return o.host();
    taken |= o.host() == r.host() && o.host_id() != id;
  }
  return taken ? own : r.host();
}

Roster::Verdict Roster::judge(const pb::Report& r, int64_t now_ms) const {
  // A predecessor's last reports may come later than the first of a life.
  constexpr int64_t kUnderWayMs = 1000;
  const auto n = newest_.find(r.worker());
  const bool heard = n != newest_.end();
  const Member* m = find(r.worker());
  const bool alive = m != nullptr && (m->alive || m->given_up);
  const uint64_t known = std::max(heard ? n->second.incarnation : 0,
                                  alive ? m->report.incarnation() : 0);
  if (r.worker().empty()) return Verdict::kStale;
  if (r.incarnation() < known)
    return heard && now_ms - n->second.since_ms > kUnderWayMs
               ? Verdict::kEarlierLife
               : Verdict::kStale;
  if (heard && r.incarnation() == n->second.incarnation &&
      r.seq() <= n->second.seq)
    return Verdict::kStale;
  if (m != nullptr && m->alive && m->report.incarnation() < r.incarnation() &&
      m->report.host() != r.host())
    return Verdict::kNameInUse;
  return Verdict::kTaken;
}

std::string Roster::refusal(const pb::Report& r, int64_t now_ms) const {
  const Member* m = find_alive(r.worker());
  switch (judge(r, now_ms)) {
    case Verdict::kNameInUse:
      return fmt::format(
          "a live worker of the name {} is on host {}; give each worker a name "
          "of its own with --name",
          r.worker(), m->report.host());
    case Verdict::kEarlierLife:
      return m != nullptr
                 ? fmt::format(
                       "by its clock it started before the worker {} on host "
                       "{}, which is alive; give workers and hosts names of "
                       "their own with --name and --host-name",
                       r.worker(), m->report.host())
                 : fmt::format(
                       "by its clock it started before the worker {} that was "
                       "last heard; it is taken {} s after the end of that one",
                       r.worker(), kEarlierLifeMs / 1000);
    default:
      return "";
  }
}

void Roster::on_disconnect(const std::string& worker, int64_t now_ms,
                           const std::string& revoked) {
  const auto it = members_.find(worker);
  if (it == members_.end() || !it->second.alive) return;
  Roster::Member& m = it->second;
  if (!revoked.empty()) {
    m.revoked = revoked;
    return;
  }
  // If nothing was heard since it was closed before, this is no new loss.
  if (m.disconnected_ms < 0) m.closed_at_ms = now_ms;
  m.disconnected_ms = now_ms;
}

void Roster::on_own_absence(int64_t gap_ms) {
  absent_ms_ += gap_ms;
  last_lost_ms_ += gap_ms;
  for (auto& [name, m] : members_) {
    m.heard_ms += gap_ms;
    if (m.disconnected_ms >= 0) m.disconnected_ms += gap_ms;
    if (m.awaited_since_ms >= 0) m.awaited_since_ms += gap_ms;
    for (auto& [rank, p] : m.progress) p.since_ms += gap_ms;
  }
  for (auto& [name, n] : newest_)
    if (n.gone_ms >= 0) n.gone_ms += gap_ms;
}

void Roster::on_unwritten(int64_t ms) {
  for (auto& [name, m] : members_)
    if (m.awaited_since_ms >= 0) m.awaited_since_ms += ms;
}

void Roster::begin_phase() {
  for (auto& [name, m] : members_) {
    m.reports_in_phase = 0;
    if (std::exchange(m.done_since_ms, -1) >= 0) m.awaited_since_ms = -1;
  }
}

void Roster::begin_generation() {
  for (auto& [name, m] : members_) m.progress.clear();
}

void Roster::end_generation(const pb::Durable& durable) {
  unreached_.clear();
  for (const pb::Durable::Member& p : durable.participants())
    if (has_ranks(durable, p.name()) && find_alive(p.name()) == nullptr)
      unreached_.insert(p.name());
}

void Roster::note_directive(const std::string& worker, const DirectiveKey& key,
                            int64_t now_ms) {
  Member& m = members_.at(worker);
  m.last_sent = key;
  m.directive_ms = now_ms;
  m.sent_away = m.sent_away || key.goal == pb::Directive::LEAVE;
}

// ----------------------------------------------------------------- queries

const Roster::Member* Roster::find(const std::string& worker) const {
  const auto it = members_.find(worker);
  return it == members_.end() ? nullptr : &it->second;
}

const Roster::Member* Roster::find_alive(const std::string& worker) const {
  const Member* m = find(worker);
  return m != nullptr && m->alive ? m : nullptr;
}

const Roster::Member* Roster::live_participant(
    const pb::Durable& durable, const std::string& worker) const {
  const Member* m = find_alive(worker);
  return m != nullptr && participates(durable, worker, m->report.incarnation())
             ? m
             : nullptr;
}

bool Roster::considers_live(const std::string& worker,
                            uint64_t incarnation) const {
  const Member* m = find_alive(worker);
  return m != nullptr && m->report.incarnation() == incarnation;
}

bool Roster::newest_is(const pb::Report& r) const {
  const Member* m = find(r.worker());
  return m != nullptr && m->reported &&
         m->report.incarnation() == r.incarnation() &&
         m->report.seq() == r.seq();
}

bool Roster::none_alive() const {
  return std::ranges::none_of(members_,
                              [](const auto& m) { return m.second.alive; });
}

bool Roster::all_heard() const {
  return std::ranges::all_of(members_, [](const auto& m) {
    return !m.second.alive || m.second.reported;
  });
}

bool Roster::all_quiesced(const pb::Durable& durable) const {
  for (const pb::Durable::Member& p : durable.participants()) {
    const Member* m = live_participant(durable, p.name());
    // A participant without ranks has nothing to end and may have missed the
    // generation altogether.
    if (m != nullptr && !m->quiesced(durable.generation()) &&
        has_ranks(durable, p.name()))
      return false;
  }
  return true;
}

bool Roster::all_started(const pb::Durable& durable) const {
  for (const pb::Durable::Member& p : durable.participants()) {
    const Member* m = live_participant(durable, p.name());
    if (m != nullptr &&
        (!m->reported || m->report.generation() != durable.generation() ||
         m->report.state() == pb::Report::PREPARED))
      return false;
  }
  return true;
}

bool Roster::all_prepared(const pb::Durable& durable,
                          int64_t joined_by_ms) const {
  return std::ranges::all_of(members_, [&](const auto& m) {
    const auto& [name, member] = m;
    return !member.alive ||
           (member.joined_ms > joined_by_ms &&
            live_participant(durable, name) == nullptr) ||
           (member.reported && !member.awaited(durable, name));
  });
}

std::string Roster::started_early(const pb::Durable& durable, bool late) const {
  for (const pb::Durable::Member& p : durable.participants()) {
    const Member* m = live_participant(durable, p.name());
    if (m == nullptr || !m->reported || !has_ranks(durable, p.name()) ||
        m->report.generation() != durable.generation())
      continue;
    const pb::Report::State state = m->report.state();
    if (state == pb::Report::RUNNING || state == pb::Report::QUIESCED ||
        (late && state == pb::Report::IDLE && !m->report.busy()))
      return p.name();
  }
  return "";
}

bool Roster::inventories_known(int64_t generation, int64_t joined_by_ms) const {
  return std::ranges::all_of(members_, [&](const auto& m) {
    return !m.second.alive || m.second.sent_away ||
           m.second.joined_ms > joined_by_ms ||
           offers_nothing(m.second.report) ||
           m.second.inventory_known(generation);
  });
}

Roster::Awaited Roster::awaited(const pb::Durable& durable,
                                int64_t now_ms) const {
  constexpr int64_t kSomeTimeMs = 2000;
  std::vector<std::string> all;
  if (isolated_) all.emplace_back("any worker: none is heard");
  for (const auto& [name, m] : members_)
    if (m.alive && m.awaited_since_ms >= 0 &&
        now_ms - m.awaited_since_ms >= kSomeTimeMs)
      if (const auto what = m.awaited(durable, name))
        all.push_back(
            fmt::format("{} on {} to {}", name, m.report.host(), *what));
  if (all.empty()) return {};
  return {.any = true, .text = "waiting for " + join(all)};
}

bool Roster::others_may_return(int64_t wait_ms, int64_t now_ms) const {
  return awaits_unheard(now_ms) ||
         (last_lost_ms_ > started_ms_ && now_ms - last_lost_ms_ < wait_ms);
}

std::string Roster::unreached_text() const {
  if (unreached_.empty()) return "";
  return fmt::format(
      "{} not reached: {}; ranks there may run until they learn of the end",
      unreached_.size() == 1 ? "1 worker was"
                             : plural(unreached_.size(), "worker") + " were",
      join({unreached_.begin(), unreached_.end()}));
}

int64_t Roster::committed_step(const pb::Durable& durable) const {
  if (durable.assignment().generation() != durable.generation()) return -1;
  const int world = durable.assignment().ranks_size();
  std::vector<bool> heard(static_cast<size_t>(world));
  int missing = world;
  int64_t least = INT64_MAX;
  for (const auto& [name, m] : members_) {
    if (!m.reported || m.report.generation() != durable.generation() ||
        !participates(durable, name, m.report.incarnation()))
      continue;
    for (const pb::RankStatus& s : m.report.ranks()) {
      if (s.rank() < 0 || s.rank() >= world) continue;
      least = std::min(least, s.committed_step());
      if (!heard[static_cast<size_t>(s.rank())]) --missing;
      heard[static_cast<size_t>(s.rank())] = true;
    }
  }
  return world == 0 || missing > 0 ? -1 : least;
}

std::optional<uint64_t> Roster::restored_digest(int64_t generation) const {
  for (const auto& [name, m] : members_)
    if (m.reported && m.report.generation() == generation)
      for (const pb::RankStatus& s : m.report.ranks())
        if (s.has_restored_digest()) return s.restored_digest();
  return std::nullopt;
}

double Roster::link_bytes_per_s(int64_t generation) const {
  constexpr double kSlowest = 1e3;
  double least = 0;
  for (const auto& [name, m] : members_)
    if (m.reported && m.report.generation() == generation)
      for (const pb::RankStatus& s : m.report.ranks()) {
        const double link = s.link_bytes_per_s();
        if (std::isfinite(link) && link >= kSlowest)
          least = least == 0 ? link : std::min(least, link);
      }
  return least;
}

}  // namespace remesh::core
