#include "worker/train/pinning.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <string>

#include "checkpoint/memory/replica_placement.h"

namespace remesh::train {

std::vector<int> cpus_of_rank(const pb::Assignment& assignment, int rank,
                              std::span<const int> allowed) {
  auto host_of = memory::hosts_by_worker(assignment);
  std::map<int, const pb::RankPlace*> places;
  for (const pb::RankPlace& p : assignment.ranks()) places[p.rank()] = &p;
  if (!places.contains(rank) || allowed.empty()) return {};
  const std::string& host = host_of[places[rank]->worker()];
  const size_t n = allowed.size();
  size_t wanted = 0;
  size_t first = 0;
  for (const auto& [r, place] : places) {
    if (host_of[place->worker()] != host) continue;
    if (place->threads() < 1) return {};
    if (r < rank) first += static_cast<size_t>(place->threads());
    wanted += static_cast<size_t>(place->threads());
  }
  if (wanted % n != 0) return {};
  const size_t depth = wanted / n;
  const auto threads = static_cast<size_t>(places[rank]->threads());
  if (threads >= n || (depth > 1 && threads > 1)) return {};
  std::vector<int> cpus;
  for (size_t i = 0; i < threads; ++i)
    cpus.push_back(allowed[(first + i) / depth]);
  return cpus;
}

Status pin_to(std::span<const int> cpus) {
  const int last = *std::max_element(cpus.begin(), cpus.end());
  std::vector<cpu_set_t> sets(static_cast<size_t>(last) / CPU_SETSIZE + 1);
  const size_t bytes = sets.size() * sizeof(cpu_set_t);
  for (const int cpu : cpus)
    CPU_SET_S(static_cast<size_t>(cpu), bytes, sets.data());
  if (sched_setaffinity(0, bytes, sets.data()) != 0)
    return errno_error("bind to CPUs", errno);
  return ok_status();
}

}  // namespace remesh::train
