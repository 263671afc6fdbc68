#include "coordinator/core/roster.h"

#include <fmt/format.h>

#include <algorithm>

#include "coordinator/core/durable.h"
#include "proto/base/text.h"

namespace remesh::core {
namespace {

// From a broken connection to the declaration of death: long enough for a
// transport to reconnect.
constexpr int64_t kDisconnectGraceMs = 250;

Roster::Change lost(const std::string& worker, const Roster::Member& m,
                    const std::string& why) {
  return {.kind = Roster::Change::Kind::kLost,
          .worker = worker,
          .detail = why,
          .incarnation = m.report.incarnation(),
          .leaving = m.leaving()};
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

// ----------------------------------------------------------------- changes

void Roster::adopt(const pb::Durable& durable, int64_t until_ms) {
  for (const pb::Durable::Member& p : durable.participants()) {
    Member m;
    m.report.set_worker(p.name());
    m.report.set_incarnation(p.incarnation());
    m.report.set_host(p.host());
    m.report.set_slots(p.slots());
    m.report.set_cores(p.cores());
    m.report.set_memory_bytes(p.memory_bytes());
    m.draining = drains(durable, p.name(), p.incarnation());
    m.heard_ms = until_ms;
    members_[p.name()] = m;
  }
}

std::optional<Roster::Changes> Roster::on_report(const pb::Report& r,
                                                 const pb::Durable& durable,
                                                 int64_t silent_ms,
                                                 int64_t now_ms) {
  auto it = members_.find(r.worker());
  const bool known = it != members_.end();
  auto& newest = newest_[r.worker()];
  const auto this_one = std::make_pair(r.incarnation(), r.seq());
  if (r.worker().empty() || this_one <= newest ||
      (known && r.incarnation() < it->second.report.incarnation()))
    return std::nullopt;
  newest = this_one;
  Changes changes;
  if (known && r.incarnation() > it->second.report.incarnation()) {
    // A later incarnation proves the earlier one dead.
    if (it->second.alive)
      changes.push_back(lost(r.worker(), it->second, "restarted"));
    it = members_.end();
  }
  const bool back = it != members_.end() && !it->second.alive;
  if (it == members_.end() || back) {
    if (it == members_.end())
      it = members_.insert_or_assign(r.worker(), Member{}).first;
    it->second.draining = drains(durable, r.worker(), r.incarnation());
    it->second.alive = true;
    it->second.death.clear();
    last_join_ms_ = now_ms;
    changes.push_back(
        {.kind = back ? Change::Kind::kReturned : Change::Kind::kJoined,
         .worker = r.worker(),
         .detail =
             fmt::format("{} on {}", plural(r.slots(), "slot"), r.host())});
  }
  Member& m = it->second;
  if (!m.report.leaving() && r.leaving())
    changes.push_back({.kind = Change::Kind::kLeaving, .worker = r.worker()});
  const int64_t gap = now_ms - m.heard_ms;
  if (gap > silent_ms)
    for (auto& [rank, p] : m.progress) p.since_ms += gap;
  for (const pb::RankStatus& s : r.ranks()) {
    Progress& p = m.progress[s.rank()];
    if (!m.reported || p.since_ms == 0 || p.value != s.progress() ||
        m.report.generation() != r.generation())
      p = {s.progress(), now_ms};
  }
  m.report = r;
  m.reported = true;
  ++m.reports_in_phase;
  m.heard_ms = now_ms;
  m.disconnected_ms = -1;
  return changes;
}

void Roster::on_disconnect(const std::string& worker, int64_t now_ms) {
  const auto it = members_.find(worker);
  if (it != members_.end() && it->second.alive)
    it->second.disconnected_ms = now_ms;
}

void Roster::on_own_absence(int64_t gap_ms) {
  for (auto& [name, m] : members_) {
    m.heard_ms += gap_ms;
    if (m.disconnected_ms >= 0) m.disconnected_ms += gap_ms;
    for (auto& [rank, p] : m.progress) p.since_ms += gap_ms;
  }
}

Roster::Changes Roster::expire(const pb::Durable& durable,
                               int64_t dead_after_ms, int64_t now_ms) {
  Changes changes;
  const bool ended = terminal(durable.phase());
  for (auto it = members_.begin(); it != members_.end();) {
    const std::string& name = it->first;
    Member& m = it->second;
    const bool part = participates(durable, name, m.report.incarnation());
    if (m.alive) {
      const bool expected = ended || (m.leaving() && !part);
      if (now_ms - m.heard_ms > dead_after_ms) {
        m.death = fmt::format("silent for {:.1f} s",
                              static_cast<double>(dead_after_ms) / 1000);
      } else if (m.disconnected_ms >= 0 &&
                 (expected ||
                  now_ms - m.disconnected_ms > kDisconnectGraceMs)) {
        m.death = "connection closed and not restored";
      }
      if (!m.death.empty()) {
        changes.push_back(lost(name, m, m.death));
        m.alive = false;
        last_loss_ms_ = now_ms;
      }
    }
    const bool needed =
        part && durable.phase() != pb::Durable::WAITING && !ended;
    if (!m.alive && !needed) {
      it = members_.erase(it);
    } else {
      ++it;
    }
  }
  return changes;
}

void Roster::begin_phase() {
  for (auto& [name, m] : members_) m.reports_in_phase = 0;
}

void Roster::begin_generation() {
  for (auto& [name, m] : members_) m.progress.clear();
}

void Roster::note_directive(const std::string& worker, std::string key,
                            bool leave, int64_t now_ms) {
  Member& m = members_.at(worker);
  m.directive_key = std::move(key);
  m.directive_ms = now_ms;
  m.sent_away = m.sent_away || leave;
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

bool Roster::none_alive() const {
  return std::none_of(members_.begin(), members_.end(),
                      [](const auto& m) { return m.second.alive; });
}

bool Roster::all_heard() const {
  return std::all_of(members_.begin(), members_.end(), [](const auto& m) {
    return !m.second.alive || m.second.reported;
  });
}

bool Roster::all_quiesced(const pb::Durable& durable) const {
  for (const pb::Durable::Member& p : durable.participants()) {
    const Member* m = live_participant(durable, p.name());
    // A participant without ranks has nothing to end and may have missed the
    // generation altogether.
    if (m != nullptr && has_ranks(durable, p.name()) &&
        !m->quiesced(durable.generation()))
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

bool Roster::all_prepared(const pb::Durable& durable) const {
  for (const auto& [name, m] : members_) {
    if (!m.alive) continue;
    if (!m.reported) return false;
    const pb::Report& r = m.report;
    // A worker that returns from silence may still have ranks of an older
    // generation, or start them on a directive in flight, until it is fenced.
    const bool fenced = r.generation() == durable.generation();
    const bool quiet = live_participant(durable, name) != nullptr
                           ? fenced && r.state() == pb::Report::PREPARED
                           : fenced && !r.busy();
    if (!quiet) return false;
  }
  return true;
}

bool Roster::inventories_known(int64_t generation) const {
  return std::all_of(members_.begin(), members_.end(), [&](const auto& m) {
    return !m.second.alive || m.second.sent_away ||
           m.second.inventory_known(generation);
  });
}

int64_t Roster::committed_step(const pb::Durable& durable) const {
  std::map<int, int64_t> committed;  // by rank
  for (const auto& [name, m] : members_)
    if (m.reported && m.report.generation() == durable.generation() &&
        participates(durable, name, m.report.incarnation()))
      for (const pb::RankStatus& s : m.report.ranks())
        committed[s.rank()] = s.committed_step();
  const int world = durable.assignment().ranks_size();
  if (world == 0 || static_cast<int>(committed.size()) < world) return -1;
  int64_t least = committed.begin()->second;
  for (const auto& [rank, step] : committed) least = std::min(least, step);
  return least;
}

std::optional<uint64_t> Roster::restored_digest(int64_t generation) const {
  for (const auto& [name, m] : members_)
    if (m.reported && m.report.generation() == generation)
      for (const pb::RankStatus& s : m.report.ranks())
        if (s.has_restored_digest()) return s.restored_digest();
  return std::nullopt;
}

}  // namespace remesh::core
