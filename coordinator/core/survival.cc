#include "coordinator/core/survival.h"

#include <algorithm>
#include <map>
#include <vector>

#include "coordinator/core/job_shape.h"
#include "parallel/geometry/shard_table.h"
#include "parallel/jobfile/jobfile.h"

namespace remesh::core {
namespace {

std::vector<int> groups_of(const pb::Assignment& a) {
  const geometry::Sharding sharding = sharding_of(a);
  std::vector<int> out;
  for (int r = 0; r < a.ranks_size(); ++r)
    out.push_back(geometry::replica_group(sharding, r));
  return out;
}

// By replica group, the hosts that have its state when the ranks have stopped
// and made their replicas.
std::map<int, std::set<std::string>> hosts_of_states(const pb::Assignment& a) {
  const std::vector<memory::RankHost> places = memory::places_of(a);
  const std::vector<int> groups = groups_of(a);
  const memory::ReplicaPlacement replicas = replicas_of(a);
  std::map<int, std::set<std::string>> out;
  for (size_t r = 0; r < places.size(); ++r) {
    std::set<std::string>& hosts = out[groups[r]];
    hosts.insert(places[r].host);
    for (const int holder : replicas.holders[r])
      hosts.insert(places[static_cast<size_t>(holder)].host);
  }
  return out;
}

}  // namespace

geometry::Sharding sharding_of(const pb::Assignment& a) {
  const pb::Parallel& p = a.job().parallel();
  return {.layout = layout_of(a.mesh()),
          .chunks = static_cast<int>(p.pipeline_chunks()),
          .zero = {.stage = static_cast<int>(p.zero_stage()),
                   .shard_group = static_cast<int>(p.zero_shard_group())}};
}

Result<geometry::Sharding> full_sharding_of(const pb::Assignment& a) {
  geometry::Sharding s = sharding_of(a);
  ASSIGN_OR_RETURN(s.bounds,
                   geometry::stage_bounds(jobfile::model_config(a.job()),
                                          s.layout.pp * s.chunks,
                                          a.job().train().seq_len()));
  return s;
}

memory::ReplicaPlacement replicas_of(const pb::Assignment& a) {
  const pb::Elastic& e = a.job().elastic();
  const int copies =
      e.replicate_every() > 0 ? static_cast<int>(e.replicas()) : 0;
  return memory::place_replicas(memory::places_of(a), groups_of(a), copies);
}

bool makes_replicas(const pb::Assignment& a) {
  for (const auto& holders : replicas_of(a).holders)
    if (!holders.empty()) return true;
  return false;
}

bool survives_on(const pb::Assignment& a, const std::set<std::string>& hosts) {
  const auto states = hosts_of_states(a);
  return !states.empty() && std::ranges::all_of(states, [&](const auto& state) {
    return std::ranges::any_of(
        state.second, [&](const auto& host) { return hosts.contains(host); });
  });
}

std::set<std::string> needed_hosts(const pb::Assignment& a) {
  std::set<std::string> needed;
  for (const auto& [group, hosts] : hosts_of_states(a))
    if (hosts.size() == 1) needed.insert(*hosts.begin());
  return needed;
}

}  // namespace remesh::core
