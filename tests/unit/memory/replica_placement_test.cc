// Replica placement, tested with every set of lost hosts and workers.
#include "checkpoint/memory/replica_placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <set>

#include "tests/testing/seed.h"

namespace remesh::memory {
namespace {

struct Cluster {
  std::vector<RankHost> ranks;
  std::vector<int> groups;
};

Cluster random_cluster(std::mt19937& random) {
  Cluster c;
  const unsigned hosts = 1 + random() % 5;
  const unsigned workers = hosts + random() % 3;
  const unsigned n = 1 + random() % 9;
  const unsigned num_groups = 1 + random() % n;
  const bool own = random() % 2 == 0;
  for (unsigned r = 0; r < n; ++r) {
    const unsigned w = random() % workers;
    c.ranks.push_back(
        {"w" + std::to_string(w), "h" + std::to_string(w % hosts)});
    if (!own) c.groups.push_back(static_cast<int>(random() % num_groups));
  }
  return c;
}

int group_of(const Cluster& c, size_t r) {
  return c.groups.empty() ? static_cast<int>(r) : c.groups[r];
}

// Whether each state survives the loss of all places for which `lost` is true.
bool survives(const Cluster& c, const ReplicaPlacement& p,
              const std::function<bool(const RankHost&)>& lost) {
  std::set<int> all, left;
  for (size_t r = 0; r < c.ranks.size(); ++r) {
    all.insert(group_of(c, r));
    if (!lost(c.ranks[r])) left.insert(group_of(c, r));
    for (const int h : p.holders[r])
      if (!lost(c.ranks[static_cast<size_t>(h)])) left.insert(group_of(c, r));
  }
  return all == left;
}

// All subsets of at most k names that leave at least one.
void check_losses(const Cluster& c, const ReplicaPlacement& p, int k,
                  bool hosts) {
  std::set<std::string> names;
  for (const RankHost& r : c.ranks) names.insert(hosts ? r.host : r.worker);
  const std::vector<std::string> all(names.begin(), names.end());
  const int most = std::min<int>(k, static_cast<int>(all.size()) - 1);
  for (unsigned set = 0; set < 1U << all.size(); ++set) {
    if (__builtin_popcount(set) > most) continue;
    const auto lost = [&](const RankHost& r) {
      const auto at =
          std::find(all.begin(), all.end(), hosts ? r.host : r.worker) -
          all.begin();
      return (set >> at & 1U) != 0;
    };
    ASSERT_TRUE(survives(c, p, lost))
        << (hosts ? "hosts " : "workers ") << set << " of " << all.size();
  }
}

TEST(ReplicaPlacement, NoStateIsLostWithTheAllowedHostsOrWorkers) {
  std::mt19937 random(test_seed());
  for (int i = 0; i < 3000 && !HasFatalFailure(); ++i) {
    const Cluster c = random_cluster(random);
    const int k = static_cast<int>(random() % 4);
    const ReplicaPlacement p = place_replicas(c.ranks, c.groups, k);
    check_losses(c, p, k, true);
    check_losses(c, p, k, false);
    const ReplicaPlacement again = place_replicas(c.ranks, c.groups, k);
    ASSERT_EQ(again.holders, p.holders);
    // No rank keeps its own worker's state, nor are there more copies than k.
    for (size_t r = 0; r < c.ranks.size(); ++r) {
      ASSERT_LE(p.holders[r].size(), static_cast<size_t>(k));
      for (const int h : p.holders[r]) {
        ASSERT_NE(c.ranks[static_cast<size_t>(h)].worker, c.ranks[r].worker);
        const auto& kept = p.kept[static_cast<size_t>(h)];
        ASSERT_EQ(std::count(kept.begin(), kept.end(), static_cast<int>(r)), 1);
      }
    }
  }
}

// Twin: whether every rank can have a holder on another host with at most
// `load` each (Kuhn's matching).
bool feasible(const std::vector<RankHost>& ranks, size_t load) {
  const size_t n = ranks.size();
  std::vector<std::vector<size_t>> kept(n);
  const std::function<bool(size_t, std::vector<bool>&)> place =
      [&](size_t r, std::vector<bool>& tried) {
        for (size_t h = 0; h < n; ++h) {
          if (ranks[h].host == ranks[r].host || tried[h]) continue;
          tried[h] = true;
          if (kept[h].size() < load) {
            kept[h].push_back(r);
            return true;
          }
          for (size_t& other : kept[h])
            if (place(other, tried)) {
              other = r;
              return true;
            }
        }
        return false;
      };
  for (size_t r = 0; r < n; ++r) {
    std::vector<bool> tried(n, false);
    if (!place(r, tried)) return false;
  }
  return true;
}

TEST(ReplicaPlacement, ReplicasAreSpreadEvenly) {
  std::mt19937 random(test_seed());
  for (int i = 0; i < 1000; ++i) {
    Cluster c = random_cluster(random);
    c.groups.clear();
    std::set<std::string> hosts;
    for (const RankHost& r : c.ranks) hosts.insert(r.host);
    if (hosts.size() < 2) continue;
    const ReplicaPlacement p = place_replicas(c.ranks, {}, 1);
    size_t most = 0;
    for (const auto& k : p.kept) most = std::max(most, k.size());
    size_t least = 1;
    while (!feasible(c.ranks, least)) ++least;
    ASSERT_LE(most, least) << "of " << c.ranks.size() << " ranks";
  }
}

TEST(ReplicaPlacement, EqualHostsKeepEqually) {
  for (int hosts = 2; hosts < 7; ++hosts)
    for (int slots = 1; slots < 5; ++slots)
      for (int k = 1; k < hosts; ++k) {
        std::vector<RankHost> ranks;
        for (int r = 0; r < hosts * slots; ++r)
          ranks.push_back({"w" + std::to_string(r / slots),
                           "h" + std::to_string(r / slots)});
        const ReplicaPlacement p = place_replicas(ranks, {}, k);
        for (const auto& kept : p.kept)
          ASSERT_EQ(kept.size(), static_cast<size_t>(k))
              << hosts << " hosts of " << slots << ", k " << k;
      }
}

TEST(ReplicaPlacement, AStateThatDataParallelRanksReplicateNeedsNoReplica) {
  const std::vector<RankHost> ranks = {
      {"a", "a"}, {"b", "b"}, {"c", "c"}, {"d", "d"}};
  const std::vector<int> same = {0, 0, 0, 0};
  for (const auto& h : place_replicas(ranks, same, 3).holders)
    EXPECT_TRUE(h.empty());
  const std::vector<int> pairs = {0, 1, 0, 1};
  for (const auto& h : place_replicas(ranks, pairs, 1).holders)
    EXPECT_TRUE(h.empty());
  size_t replicas = 0;
  for (const auto& h : place_replicas(ranks, pairs, 2).holders)
    replicas += h.size();
  EXPECT_EQ(replicas, 2U);
}

}  // namespace
}  // namespace remesh::memory
