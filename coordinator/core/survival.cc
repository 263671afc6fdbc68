#include "coordinator/core/survival.h"

#include <map>
#include <vector>

#include "checkpoint/memory/buddies.h"
#include "coordinator/core/job_shape.h"

namespace remesh::core {
namespace {

std::vector<memory::RankPlace> places_of(const pb::Assignment& a) {
  std::map<std::string, std::string> host;
  for (int i = 0; i < a.workers_size() && i < a.hosts_size(); ++i)
    host[a.workers(i)] = a.hosts(i);
  std::vector<memory::RankPlace> out;
  for (const pb::RankPlace& p : a.ranks())
    out.push_back({.worker = p.worker(), .host = host[p.worker()]});
  return out;
}

std::vector<int> classes_of(const pb::Assignment& a) {
  const geometry::Sharding sharding = sharding_of(a);
  std::vector<int> out;
  for (int r = 0; r < a.ranks_size(); ++r)
    out.push_back(geometry::replica_group(sharding, r));
  return out;
}

memory::Placement placement_of(const pb::Assignment& a) {
  const pb::Elastic& e = a.job().elastic();
  const int copies =
      e.replicate_every() > 0 ? static_cast<int>(e.replicas()) : 0;
  return memory::place_replicas(places_of(a), classes_of(a), copies);
}

}  // namespace

geometry::Sharding sharding_of(const pb::Assignment& a) {
  const pb::Parallel& p = a.job().parallel();
  return {.layout = layout_of(a.mesh()),
          .chunks = static_cast<int>(p.pipeline_chunks()),
          .zero = {.stage = static_cast<int>(p.zero_stage()),
                   .shard_group = static_cast<int>(p.zero_shard_group())}};
}

bool makes_replicas(const pb::Assignment& a) {
  for (const auto& holders : placement_of(a).holders)
    if (!holders.empty()) return true;
  return false;
}

bool survives_on(const pb::Assignment& a, const std::set<std::string>& hosts) {
  const std::vector<memory::RankPlace> places = places_of(a);
  const std::vector<int> classes = classes_of(a);
  const memory::Placement replicas = placement_of(a);
  std::map<int, bool> safe;  // by content class
  for (size_t r = 0; r < places.size(); ++r) {
    bool& is_safe = safe[classes[r]];
    is_safe = is_safe || hosts.contains(places[r].host);
    for (const int holder : replicas.holders[r])
      is_safe =
          is_safe || hosts.contains(places[static_cast<size_t>(holder)].host);
  }
  for (const auto& [content, is_safe] : safe)
    if (!is_safe) return false;
  return !safe.empty();
}

}  // namespace remesh::core
