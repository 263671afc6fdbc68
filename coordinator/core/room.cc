#include "coordinator/core/room.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <vector>

#include "checkpoint/manifest/conversions.h"
#include "checkpoint/memory/replica_placement.h"
#include "checkpoint/memory/segment.h"
#include "coordinator/core/survival.h"
#include "proto/base/text.h"

namespace remesh::core {
namespace {

// For the files with which MPI connects the ranks of a host.
constexpr uint64_t kBesideStates = uint64_t{4} << 20;  // a rank

struct Part {
  std::vector<geometry::Piece> pieces;
  int64_t elements = 0;
};

// What the ranks of a sharding hold, by replica group.
class Parts {
 public:
  Parts(const geometry::ParamTable& table, geometry::Sharding sharding)
      : table_(table), sharding_(std::move(sharding)) {}
  // Null if there is no such rank.
  const Part* of(int rank) {
    if (rank < 0 || rank >= sharding_.layout.world()) return nullptr;
    const int group = geometry::replica_group(sharding_, rank);
    if (const auto it = known_.find(group); it != known_.end())
      return &it->second;
    const auto shard = geometry::make_rank_shard(table_, sharding_, rank);
    if (!shard.ok()) return nullptr;
    return &known_
                .emplace(group, Part{geometry::held_pieces(*shard),
                                     shard->zero.state_elements()})
                .first->second;
  }

 private:
  const geometry::ParamTable& table_;
  const geometry::Sharding sharding_;
  std::map<int, Part> known_;
};

// Adds what the states to read need, and returns the ranks that reuse one of
// them in place.
std::set<int> add_source(const pb::Assignment& a,
                         const geometry::ParamTable& table, Parts& wanted,
                         std::map<std::string, uint64_t>* restoring) {
  std::set<int> reusing;
  if (a.source().states().empty()) return reusing;
  const auto from = manifest::parse_sharding(a.source().states(0).sharding());
  if (!from.ok()) return reusing;
  Parts held(table, *from);
  for (const pb::StateHolding& h : a.source().states()) {
    const Part* part = held.of(h.rank());
    const auto reuser =
        std::ranges::find_if(a.ranks(), [&](const pb::RankPlace& p) {
          const Part* own = wanted.of(p.rank());
          return part != nullptr && own != nullptr &&
                 p.worker() == h.worker() && !reusing.contains(p.rank()) &&
                 own->pieces == part->pieces;
        });
    if (reuser != a.ranks().end())
      reusing.insert(reuser->rank());
    else
      (*restoring)[h.host()] += memory::half_segment_bytes(h.elements());
  }
  return reusing;
}

// By worker, what its ranks hold once they have made a step.
std::map<std::string, uint64_t> held_while_running(
    const pb::Assignment& a, const geometry::ParamTable& table) {
  std::map<std::string, uint64_t> out;
  const auto sharding = full_sharding_of(a);
  if (!sharding.ok()) return out;
  Parts parts(table, *sharding);
  const memory::ReplicaPlacement replicas = replicas_of(a);
  const auto add = [&](const std::string& worker, int rank) {
    if (const Part* part = parts.of(rank))
      out[worker] += memory::segment_bytes(part->elements);
  };
  for (const pb::RankPlace& p : a.ranks()) {
    add(p.worker(), p.rank());
    for (const int owner : replicas.kept[static_cast<size_t>(p.rank())])
      add(p.worker(), owner);
  }
  return out;
}

uint64_t held_as_reported(const pb::Report& report) {
  std::map<std::string, int64_t> segments;
  for (const pb::StateHolding& h : report.holdings())
    segments[h.segment()] = std::max(segments[h.segment()], h.elements());
  uint64_t held = 0;
  for (const auto& [path, elements] : segments)
    held += memory::segment_bytes(elements);
  return held;
}

// By host, what its workers report together: each counts the states in its own
// folder, and all of them what is free.
std::map<std::string, uint64_t> rooms(
    const Roster& roster, const std::map<std::string, uint64_t>& running) {
  struct Room {
    uint64_t free = UINT64_MAX, held = 0;
  };
  std::map<std::string, Room> hosts;
  for (const auto& [name, m] : roster.members()) {
    if (!m.alive || !m.report.has_state_room()) continue;
    const auto ranks = running.find(name);
    uint64_t held = ranks != running.end() && !m.report.has_inventory()
                        ? ranks->second
                        : held_as_reported(m.report);
    held = std::min<uint64_t>(held, m.report.state_room());
    Room& room = hosts[m.report.host()];
    room.free = std::min(room.free, m.report.state_room() - held);
    room.held += held;
  }
  std::map<std::string, uint64_t> out;
  for (const auto& [host, room] : hosts) out[host] = room.free + room.held;
  return out;
}

void read_each_state_once(pb::Source* source) {
  std::set<int> seen;
  auto* states = source->mutable_states();
  states->erase(std::remove_if(states->begin(), states->end(),
                               [&](const auto& h) {
                                 return !seen.insert(h.rank()).second;
                               }),
                states->end());
}

}  // namespace

Shortages find_shortages(const pb::Assignment& a,
                         const geometry::ParamTable& table,
                         const Roster& roster, const pb::Assignment* running) {
  const auto sharding = full_sharding_of(a);
  if (!sharding.ok()) return {};
  Parts wanted(table, *sharding);
  const std::vector<memory::RankHost> places = memory::places_of(a);
  const pb::Elastic& elastic = a.job().elastic();
  std::map<std::string, uint64_t> restoring, training;
  const std::set<int> reusing = add_source(a, table, wanted, &restoring);
  const auto segment_of = [&](int rank) {
    const Part* part = wanted.of(rank);
    return part == nullptr ? 0 : memory::segment_bytes(part->elements);
  };
  const memory::ReplicaPlacement replicas = replicas_of(a);
  const bool lags = makes_replicas(a) && elastic.replicate_every() > 1;
  for (size_t r = 0; r < places.size(); ++r) {
    const auto rank = static_cast<int>(r);
    const std::string& host = places[r].host;
    const Part* part = wanted.of(rank);
    if (part == nullptr) continue;
    restoring[host] +=
        kBesideStates + (reusing.contains(rank)
                             ? memory::segment_bytes(part->elements)
                             : memory::half_segment_bytes(part->elements));
    training[host] += kBesideStates + segment_of(rank) * (lags ? 2 : 1);
    for (const int owner : replicas.kept[r])
      training[host] += segment_of(owner);
  }
  Shortages out;
  std::map<std::string, uint64_t> held;
  if (running != nullptr) held = held_while_running(*running, table);
  for (const auto& [host, available] : rooms(roster, held)) {
    const uint64_t needed = std::max(restoring[host], training[host]);
    if (needed > available)
      out[host] = {.needed = needed, .available = available};
  }
  return out;
}

void start_from(const pb::Assignment& running,
                const geometry::ParamTable& table, pb::Assignment* next) {
  next->clear_source();
  const auto sharding = full_sharding_of(running);
  if (!sharding.ok()) return;
  Parts parts(table, *sharding);
  std::set<std::string> hosts;  // where a rank can read
  for (const memory::RankHost& p : memory::places_of(*next))
    hosts.insert(p.host);
  next->mutable_source()->set_kind(pb::Source::MEMORY);
  const std::vector<memory::RankHost> places = memory::places_of(running);
  for (const pb::RankPlace& p : running.ranks()) {
    const std::string& host = places[static_cast<size_t>(p.rank())].host;
    const Part* part = parts.of(p.rank());
    if (part == nullptr || !hosts.contains(host)) continue;
    pb::StateHolding* h = next->mutable_source()->add_states();
    h->set_rank(p.rank());
    h->set_worker(p.worker());
    h->set_host(host);
    h->set_elements(part->elements);
    *h->mutable_sharding() = manifest::sharding_info(*sharding);
  }
}

Shortages fit_room(const geometry::ParamTable& table, const Roster& roster,
                   bool replicas, pb::Assignment* a, std::string* given_up,
                   const pb::Assignment* running) {
  given_up->clear();
  if (!replicas) a->mutable_job()->mutable_elastic()->set_replicas(0);
  Shortages first = find_shortages(*a, table, roster, running);
  if (first.empty()) return first;
  read_each_state_once(a->mutable_source());
  Shortages still = find_shortages(*a, table, roster, running);
  if (still.empty() || !makes_replicas(*a)) return still;
  a->mutable_job()->mutable_elastic()->set_replicas(0);
  *given_up = "no replicas are kept: " + to_text(still);
  return find_shortages(*a, table, roster, running);
}

bool same_hosts(const Shortages& a, const Shortages& b) {
  return std::ranges::equal(
      a, b, [](const auto& x, const auto& y) { return x.first == y.first; });
}

std::string to_text(const Shortages& shortages) {
  std::vector<std::string> parts;
  for (const auto& [host, s] : shortages)
    parts.push_back(
        fmt::format("host {} needs {} of shared memory for states "
                    "and has {}",
                    host, format_bytes(s.needed), format_bytes(s.available)));
  return join(parts);
}

}  // namespace remesh::core
