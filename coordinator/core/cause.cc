#include "coordinator/core/cause.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "checkpoint/memory/replica_placement.h"
#include "proto/base/check.h"
#include "proto/base/exit_code.h"
#include "proto/base/process.h"
#include "proto/rundir/events.h"

namespace remesh::core {
namespace {

bool process_stopped(const pb::RankStatus& s) {
  return s.os_state() == "T" || s.os_state() == "t";
}

constexpr int kVictim = 3;

// The smallest class failed first.
int death_class(const pb::RankStatus& s) {
  if (died_of_itself(s)) return 0;
  // A rank whose peer is gone cannot complete the MPI world.
  if (s.signal() == 0 && s.exit_code() == kExitWorld) return kVictim;
  if (!s.error().empty()) return 1;
  return s.waits() ? kVictim : 2;
}

// -------------------------------------------------------- waiting for whom

// Whether b has reached the collective that a waits in, or passed it.
bool has_joined(const pb::RankStatus& a, const pb::RankStatus& b) {
  if (!a.has_at() || !b.has_at())
    return b.waits() && a.has_at() == b.has_at() && a.phase() == b.phase();
  const pb::RankOperation& x = a.at();
  const pb::RankOperation& y = b.at();
  return x.has_number() && y.has_number() && x.group() == y.group() &&
         std::ranges::equal(x.ranks(), y.ranks()) && y.number() >= x.number();
}

// The ranks whose part in its operation a waiting rank is missing. by_rank:
// where they are in `ranks`.
std::vector<size_t> missed_by(const std::vector<RankView>& ranks,
                              const std::map<int, size_t>& by_rank, size_t i) {
  const pb::RankStatus& a = *ranks[i].status;
  std::vector<size_t> out;
  const auto look_at = [&](size_t j) {
    if (j != i && (a.at().has_peer() || !has_joined(a, *ranks[j].status)))
      out.push_back(j);
  };
  const auto look_for = [&](int rank) {
    if (const auto it = by_rank.find(rank); it != by_rank.end())
      look_at(it->second);
  };
  if (a.at().has_peer())
    look_for(a.at().peer());
  else if (a.at().ranks().empty())
    for (size_t j = 0; j < ranks.size(); ++j) look_at(j);
  else
    for (const int rank : a.at().ranks()) look_for(rank);
  return out;
}

// Rank i and every rank that it waits for, directly or through others; no
// further once it is `enough` of them.
std::vector<size_t> waited_for(const std::vector<std::vector<size_t>>& missed,
                               size_t i, size_t enough) {
  std::vector<bool> seen(missed.size(), false);
  std::vector<size_t> out = {i};
  seen[i] = true;
  for (size_t at = 0; at < out.size() && out.size() < enough; ++at)
    for (const size_t j : missed[out[at]]) {
      if (seen[j]) continue;
      seen[j] = true;
      out.push_back(j);
    }
  return out;
}

// If all ranks wait: those that wait only for each other.
std::vector<size_t> smallest_cycle(const std::vector<RankView>& ranks) {
  std::map<int, size_t> by_rank;
  for (size_t i = 0; i < ranks.size(); ++i)
    by_rank[ranks[i].status->rank()] = i;
  std::vector<std::vector<size_t>> missed;
  for (size_t i = 0; i < ranks.size(); ++i)
    missed.push_back(missed_by(ranks, by_rank, i));
  std::vector<size_t> cycle(ranks.size() + 1);
  for (size_t i = 0; i < ranks.size(); ++i) {
    std::vector<size_t> b = waited_for(missed, i, cycle.size());
    if (b.size() < cycle.size()) cycle = std::move(b);
  }
  return cycle;
}

// The rank of that cycle that waits in the earliest operation.
size_t earliest_waiter(const std::vector<RankView>& ranks,
                       const std::vector<size_t>& cycle) {
  const auto key = [&](size_t i) {
    const pb::RankStatus& s = *ranks[i].status;
    return std::make_tuple(s.step(), s.at().number(), s.rank());
  };
  return *std::ranges::min_element(
      cycle, [&](size_t a, size_t b) { return key(a) < key(b); });
}

}  // namespace

pb::Cause cause_of(const std::string& what) {
  pb::Cause c;
  c.set_what(what);
  return c;
}

pb::Cause change_of_plan(const std::string& why) {
  pb::Cause c = cause_of(why);
  c.set_planned(true);
  return c;
}

std::string text_of(const pb::Cause& c) {
  return c.subject().empty() ? c.what() : c.subject() + ": " + c.what();
}

std::vector<Link> links_of(const pb::Cause& c) {
  std::vector<Link> links;
  for (int i = 0; i + 1 < c.links_size(); i += 2)
    links.emplace_back(c.links(i), c.links(i + 1));
  return links;
}

void set_links(const std::vector<Link>& links, pb::Cause* c) {
  c->clear_links();
  for (const auto& [a, b] : links) {
    c->add_links(a);
    c->add_links(b);
  }
}

bool died_of_itself(const pb::RankStatus& s) {
  return s.signal() != 0 && !(s.signal() == SIGABRT && s.waits());
}

bool source_is_bad(const pb::Cause& f, const pb::Source& source) {
  return f.exit_code() == kExitBadSource && source.kind() != pb::Source::INIT;
}

bool tells_why(int exit_code) {
  return exit_code == kExitFailed || exit_code == kExitBadSource ||
         exit_code == kExitNoRoom || exit_code == kExitUnreadable;
}

bool died_like(const pb::RankStatus& s, const pb::RankStatus& first) {
  if (!s.exited() || s.killed_by_worker() || s.signal() != first.signal())
    return false;
  if (s.signal() != 0) return died_of_itself(s);
  return s.exit_code() == first.exit_code() && s.exit_code() != 0 &&
         (tells_why(s.exit_code()) || s.phase() == pb::RankStatus::STARTING);
}

std::optional<size_t> first_death(const std::vector<RankView>& ranks) {
  // The clocks of two hosts may differ by any amount, so exit times count only
  // within one.
  using Key = std::tuple<int, int64_t, double, size_t>;
  std::map<std::string, Key> firsts;  // by host
  for (size_t i = 0; i < ranks.size(); ++i) {
    const pb::RankStatus& s = *ranks[i].status;
    if (!s.exited() || s.killed_by_worker() ||
        (s.signal() == 0 && s.exit_code() == 0))
      continue;
    const Key key = {death_class(s), ranks[i].exit_seen_ms, s.exit_time(), i};
    const auto [it, fresh] = firsts.emplace(ranks[i].host, key);
    const auto in_host = [](const Key& k) {
      return std::make_tuple(std::get<0>(k), std::get<2>(k), std::get<3>(k));
    };
    if (!fresh && in_host(key) < in_host(it->second)) it->second = key;
  }
  std::optional<Key> best;
  for (const auto& [host, key] : firsts)
    if (!best || key < *best) best = key;
  return best ? std::optional(std::get<3>(*best)) : std::nullopt;
}

std::string rank_name(const RankView& r) {
  return fmt::format("rank {} on worker {}", r.status->rank(), r.worker);
}

std::string death_text(const RankView& r) {
  const pb::RankStatus& s = *r.status;
  std::string out = (s.signal() != 0 ? "killed by " : "") +
                    exit_text(s.signal(), s.exit_code());
  if (!s.error().empty()) out += ": " + s.error();
  if (!s.doing().empty()) out += "; it was at " + events::doing_text(s);
  // An error message says more than the log, and so does the operation that a
  // signal interrupted.
  const bool log_helps =
      s.doing().empty() || s.signal() == 0 || s.signal() == SIGABRT;
  if (s.error().empty() && log_helps && !s.last_log().empty())
    out += "; last log line: " + s.last_log();
  return out;
}

Stuck find_stuck(const std::vector<RankView>& ranks) {
  CHECK(!ranks.empty());
  std::optional<size_t> best;
  std::tuple<bool, int64_t> best_key;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const pb::RankStatus& s = *ranks[i].status;
    const bool stopped = process_stopped(s);
    if (s.waits() && !stopped) continue;
    const auto key = std::make_tuple(!stopped, -ranks[i].stalled_ms);
    if (best && best_key <= key) continue;
    best = i;
    best_key = key;
  }
  if (best) return {.rank = *best};
  Stuck out{.lost_message = true, .cycle = smallest_cycle(ranks)};
  out.rank = earliest_waiter(ranks, out.cycle);
  return out;
}

std::string stuck_text(const std::vector<RankView>& ranks, const Stuck& stuck) {
  const RankView& r = ranks[stuck.rank];
  const pb::RankStatus& s = *r.status;
  const std::string where =
      s.doing().empty()
          ? fmt::format("step {}, microbatch {}", s.step(), s.microbatch())
          : s.doing();
  const std::string stalled = fmt::format(
      "no progress for {:.1f} s", static_cast<double>(r.stalled_ms) / 1000);
  if (stuck.lost_message)
    return fmt::format(
        "{}: every rank waits for others, {} at {}: a message was lost",
        stalled, rank_name(r), where);
  const auto waiting =
      std::ranges::count_if(
          ranks, [](const RankView& x) { return x.status->waits(); }) -
      (s.waits() ? 1 : 0);
  std::string out = fmt::format("{} at {}", stalled, where);
  if (process_stopped(s)) out += " (its process is stopped)";
  if (waiting > 0)
    out += fmt::format("; {} other rank{} for it", waiting,
                       waiting == 1 ? " waits" : "s wait");
  return out;
}

std::vector<Link> silent_links(const std::vector<RankView>& ranks,
                               const Stuck& stuck) {
  if (!stuck.lost_message) return {};
  std::set<Link> links;
  const auto add = [&](const std::string& a, const std::string& b) {
    if (a != b) links.insert(std::minmax(a, b));
  };
  for (const size_t i : stuck.cycle)
    for (const RankView& other : ranks)
      if (ranks[i].status->at().has_peer() &&
          ranks[i].status->at().peer() == other.status->rank())
        add(ranks[i].host, other.host);
  return {links.begin(), links.end()};
}

std::set<std::string> silent_hosts(const std::vector<RankView>& ranks,
                                   const Stuck& stuck) {
  std::set<std::string> hosts;
  if (!stuck.lost_message || !silent_links(ranks, stuck).empty()) return hosts;
  const auto& members = ranks[stuck.rank].status->at().ranks();
  for (const RankView& r : ranks)
    if (members.empty() ||
        std::ranges::find(members, r.status->rank()) != members.end())
      hosts.insert(r.host);
  return hosts;
}

std::vector<Link> broken_link(const std::vector<RankView>& ranks,
                              const RankView& dead) {
  const pb::RankStatus& s = *dead.status;
  if (death_class(s) != kVictim || !s.at().has_peer()) return {};
  for (const RankView& r : ranks)
    if (r.status->rank() == s.at().peer() && r.host != dead.host)
      return {std::minmax(dead.host, r.host)};
  return {};
}

std::set<std::string> unconnected_hosts(const pb::Assignment& plan,
                                        const RankView& dead) {
  std::set<std::string> hosts;
  const pb::RankStatus& s = *dead.status;
  if (s.signal() != 0 || s.exit_code() != kExitWorld || s.has_at() ||
      s.phase() > pb::RankStatus::CONNECTING)
    return hosts;
  for (const memory::RankHost& r : memory::places_of(plan))
    hosts.insert(r.host);
  return hosts;
}

void fill_failure(const RankView& r, pb::EventRecord* e) {
  const pb::RankStatus& s = *r.status;
  if (!r.host.empty()) e->set_host(r.host);
  if (!s.doing().empty()) e->set_doing(events::doing_text(s));
  if (!s.flight_record().empty()) e->set_flight_record(s.flight_record());
  for (const std::string& line : s.log_tail()) e->add_last_log(line);
  // How an abort ended the rank says nothing about it.
  if (!s.exited() || s.killed_by_worker()) return;
  if (s.signal() != 0)
    e->set_signal(s.signal());
  else
    e->set_exit_code(s.exit_code());
}

}  // namespace remesh::core
