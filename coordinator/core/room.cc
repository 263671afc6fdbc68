#include "coordinator/core/room.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <vector>

#include "checkpoint/manifest/sharding.h"
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
    const auto reuser = std::find_if(
        a.ranks().begin(), a.ranks().end(), [&](const pb::RankPlace& p) {
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

// By host, what its workers report together: each counts the states in its own
// folder, and all of them what is free.
std::map<std::string, uint64_t> rooms(const Roster& roster) {
  struct Room {
    uint64_t free = UINT64_MAX, held = 0;
  };
  std::map<std::string, Room> hosts;
  for (const auto& [name, m] : roster.members()) {
    if (!m.alive || !m.report.has_state_room()) continue;
    std::map<std::string, int64_t> segments;
    for (const pb::StateHolding& h : m.report.holdings())
      segments[h.segment()] = std::max(segments[h.segment()], h.elements());
    uint64_t held = 0;
    for (const auto& [path, elements] : segments)
      held += memory::segment_bytes(elements);
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
                         const Roster& roster) {
  const auto sharding = whole_sharding_of(a);
  if (!sharding.ok()) return {};
  Parts wanted(table, *sharding);
  const std::vector<memory::RankPlace> places = memory::places_of(a);
  const pb::Elastic& elastic = a.job().elastic();
  std::map<std::string, uint64_t> restoring, running;
  const std::set<int> reusing = add_source(a, table, wanted, &restoring);
  const auto whole = [&](int rank) {
    const Part* part = wanted.of(rank);
    return part == nullptr ? 0 : memory::segment_bytes(part->elements);
  };
  const memory::Placement replicas = replicas_of(a);
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
    running[host] += kBesideStates + whole(rank) * (lags ? 2 : 1);
    for (const int owner : replicas.kept[r]) running[host] += whole(owner);
  }
  Shortages out;
  for (const auto& [host, available] : rooms(roster)) {
    const uint64_t needed = std::max(restoring[host], running[host]);
    if (needed > available)
      out[host] = {.needed = needed, .available = available};
  }
  return out;
}

Shortages fit_room(const geometry::ParamTable& table, const Roster& roster,
                   bool replicas, pb::Assignment* a, std::string* given_up) {
  given_up->clear();
  if (!replicas) a->mutable_job()->mutable_elastic()->set_replicas(0);
  Shortages first = find_shortages(*a, table, roster);
  if (first.empty()) return first;
  read_each_state_once(a->mutable_source());
  Shortages still = find_shortages(*a, table, roster);
  if (still.empty() || !makes_replicas(*a)) return still;
  a->mutable_job()->mutable_elastic()->set_replicas(0);
  *given_up = "no replicas are kept: " + to_text(still);
  return find_shortages(*a, table, roster);
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
