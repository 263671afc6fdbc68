// Who is dead: the part of Roster that judges silence.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string_view>
#include <utility>

#include "coordinator/core/durable.h"
#include "coordinator/core/roster.h"

namespace remesh::core {
namespace {

// From a closed connection to the declaration of death, by default at least:
// long enough for a transport to reconnect.
constexpr int64_t kReconnectMs = 250;

// Its connection was closed while the network still told of it.
bool closed(const Roster::Member& m, int64_t dead_after_ms) {
  return m.reported && m.disconnected_ms >= 0 &&
         m.disconnected_ms - m.heard_ms < dead_after_ms / 2;
}

// It said so, or was told to: its connection is closed for good.
bool is_going(const Roster::Member& m) { return m.leaving() || m.sent_away; }

}  // namespace

int64_t closed_after_ms(int64_t configured_ms, int64_t dead_after_ms) {
  return std::min(dead_after_ms,
                  configured_ms >= 0
                      ? configured_ms
                      : std::max(kReconnectMs, dead_after_ms / 8));
}

Roster::MembershipChange Roster::lost(const std::string& worker,
                                      const Member& m, const std::string& why) {
  return {.kind = MembershipChange::Kind::kLost,
          .worker = worker,
          .detail = why,
          .incarnation = m.report.incarnation(),
          .leaving = m.leaving(),
          .sent_away = m.sent_away};
}

// Nobody else could be heard, either: all have time again.
void Roster::note_heard(int64_t now_ms) {
  int64_t last_ms = INT64_MIN;
  for (const auto& [name, m] : members_)
    if (m.alive && m.reported) last_ms = std::max(last_ms, m.heard_ms);
  if (last_ms < now_ms && last_ms >= 0) on_own_absence(now_ms - last_ms);
  for (auto& [name, m] : members_) {
    m.heard_ms = std::max(m.heard_ms, now_ms);
    m.disconnected_ms = -1;
    m.cut_off = true;
  }
  cut_off_ = isolated_ = false;
}

void Roster::note_gone(const std::string& worker, int64_t now_ms) {
  const auto n = newest_.find(worker);
  if (n != newest_.end() && n->second.gone_ms < 0) n->second.gone_ms = now_ms;
}

int64_t Roster::last_heard_ms() const {
  int64_t last = 0;
  for (const auto& [name, m] : members_)
    if (m.alive) last = std::max(last, m.heard_ms);
  return last;
}

Roster::CutOff Roster::cut_off(const pb::Durable& durable,
                               int64_t dead_after_ms, int64_t now_ms) const {
  if (terminal(durable.phase())) return {};
  std::set<std::string_view> silent, closed_on;
  int64_t first_ms = INT64_MAX, last_ms = INT64_MIN;
  for (const auto& [name, m] : members_) {
    if (!m.alive || (is_going(m) && closed(m, dead_after_ms))) continue;
    if (m.disconnected_ms >= 0) {
      first_ms = std::min(first_ms, m.closed_at_ms);
      last_ms = std::max(last_ms, m.closed_at_ms);
    }
    if (m.disconnected_ms >= 0 || !m.reported)
      closed_on.insert(m.report.host());
    if (closed(m, dead_after_ms)) continue;
    if (m.reported && now_ms - m.heard_ms <= dead_after_ms / 2) return {};
    silent.insert(m.report.host());
  }
  // Whoever wants the job to stop does not wait for what may be dead.
  const bool stop = durable.stop().asked();
  const bool at_once =
      !stop && closed_on.size() > 1 &&
      (last_ms < first_ms || last_ms - first_ms <= kReconnectMs);
  if (at_once) silent.merge(closed_on);
  if (silent.size() < 2 ||
      (stop && now_ms - last_heard_ms() > kIsolatedLimits * dead_after_ms))
    return {};
  return {.from_all = true, .closed = at_once};
}

// "" if it is not dead.
std::string Roster::death_of(const Member& m, int64_t dead_after_ms,
                             int64_t closed_ms, int64_t now_ms) {
  if (now_ms - m.heard_ms > dead_after_ms)
    return fmt::format("silent for {:.1f} s",
                       static_cast<double>(dead_after_ms) / 1000);
  if (!m.cut_off && m.disconnected_ms >= 0 &&
      now_ms - m.disconnected_ms > closed_ms)
    return "connection closed and not restored";
  return "";
}

// Gives the live member up if the phase has waited too long for it. Counts up
// to its last report: silence is judged by dead_after_ms alone.
void Roster::watch_wait(const pb::Durable& durable, const std::string& name,
                        int64_t now_ms, Member* m) const {
  constexpr int64_t kCountsMs = 2000;
  const auto what = m->awaited(durable, name);
  if (!what && m->awaited_since_ms >= 0) {
    // One that does it for a moment only keeps all waiting as well.
    if (m->done_since_ms < 0) m->done_since_ms = now_ms;
    if (now_ms - m->done_since_ms >= kCountsMs)
      m->awaited_since_ms = m->done_since_ms = -1;
  }
  if (!what) return;
  m->done_since_ms = -1;
  if (m->awaited_since_ms < 0) {
    m->awaited_since_ms = now_ms;
  } else if (m->heard_ms - m->awaited_since_ms > kAwaitedMs) {
    m->given_up = true;
    m->death = fmt::format(
        "it answers, but did not {} for {} s; given up until it has", *what,
        kAwaitedMs / 1000);
  }
}

Roster::Changes Roster::expire(const pb::Durable& durable,
                               int64_t dead_after_ms, int64_t now_ms,
                               int64_t closed_after_ms) {
  Changes changes;
  const bool ended = terminal(durable.phase());
  const CutOff cut = cut_off(durable, dead_after_ms, now_ms);
  cut_off_ = cut.from_all;
  const bool was_isolated = std::exchange(
      isolated_,
      cut.from_all && (isolated_ || now_ms - last_heard_ms() > dead_after_ms));
  if (isolated_ && !was_isolated)
    changes.push_back(
        {.kind = MembershipChange::Kind::kCutOff,
         .detail = fmt::format(
             "no worker is heard for {:.1f} s: the coordinator itself seems to "
             "be cut off; it waits until one is heard again",
             static_cast<double>(dead_after_ms) / 1000)});
  for (auto it = members_.begin(); it != members_.end();) {
    const std::string& name = it->first;
    Member& m = it->second;
    const auto part = [&, &worker = name] {
      return participates(durable, worker, m.report.incarnation());
    };
    if (m.alive) {
      const bool leaving_for_good = ended || (m.sent_away && !part());
      if (!m.revoked.empty())
        m.death = m.revoked;
      else if (!cut.from_all ||
               (closed(m, dead_after_ms) && (!cut.closed || is_going(m))))
        m.death = death_of(
            m, dead_after_ms,
            leaving_for_good
                ? -1
                : core::closed_after_ms(closed_after_ms, dead_after_ms),
            now_ms);
      if (m.death.empty()) watch_wait(durable, name, now_ms, &m);
      if (!m.death.empty()) {
        changes.push_back(lost(name, m, m.death));
        m.alive = false;
        last_lost_ms_ = now_ms;
        if (!m.given_up) note_gone(name, now_ms);
      }
    }
    const auto needed = [&] {
      return (durable.phase() != pb::Durable::WAITING && !ended && part()) ||
             (m.given_up && now_ms - m.heard_ms <= dead_after_ms);
    };
    if (!m.alive && !needed()) {
      note_gone(name, now_ms);
      it = members_.erase(it);
    } else {
      ++it;
    }
  }
  std::erase_if(newest_, [&](const auto& n) {
    return n.second.gone_ms >= 0 && now_ms - n.second.gone_ms > kEarlierLifeMs;
  });
  return changes;
}

}  // namespace remesh::core
