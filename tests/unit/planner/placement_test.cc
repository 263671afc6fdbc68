#include "parallel/planner/placement.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "tests/testing/expect.h"
#include "tests/testing/seed.h"

namespace remesh::planner {
namespace {

using Rng = std::mt19937_64;

PlacementRequest random_request(Rng& rng) {
  PlacementRequest q;
  const int workers = pick(rng, 0, 6);
  for (int i = 0; i < workers; ++i)
    q.workers.push_back({.worker = "w" + std::to_string(i),
                         .host = "h" + std::to_string(pick(rng, 0, 3)),
                         .slots = pick(rng, 0, 4),
                         .cores = pick(rng, 0, 9)});
  std::shuffle(q.workers.begin(), q.workers.end(), rng);
  q.degrees.dp = pick(rng, 0, 2) == 0 ? pick(rng, 1, 5) : -1;
  if (pick(rng, 0, 1) == 0) {
    q.degrees.tp = pick(rng, 1, 3);
    q.degrees.pp = pick(rng, 1, 2);
  }
  q.microbatches = pick(rng, 1, 12);
  q.min_slots = pick(rng, 1, 3);
  q.max_slots = pick(rng, 0, 1) == 0 ? -1 : pick(rng, 1, 12);
  return q;
}

int slots_of(const PlacementRequest& q) {
  int n = 0;
  for (const auto& w : q.workers) n += w.slots;
  return n;
}

const WorkerSlots& worker(const PlacementRequest& q, const std::string& name) {
  for (const auto& w : q.workers)
    if (w.worker == name) return w;
  ADD_FAILURE() << "no worker " << name;
  return q.workers.front();
}

class PlacementProperty : public testing::Test {
 protected:
  PlacementProperty() { std::printf("seed %llu\n", (unsigned long long)seed_); }

  // Deals that succeed, with some previous mesh half of the time.
  template <typename F>
  void for_random_deals(const F& f) {
    int placed = 0;
    for (int trial = 0; trial < 3000; ++trial) {
      PlacementRequest q = random_request(rng_);
      if (pick(rng_, 0, 1) == 0) {
        PlacementRequest old = random_request(rng_);
        const auto d = place_mesh(old);
        if (d.ok()) q.previous = d->ranks;
      }
      const auto d = place_mesh(q);
      if (!d.ok()) continue;
      ++placed;
      f(q, *d);
      if (HasFailure()) return;
    }
    EXPECT_GT(placed, 500);
  }

  uint64_t seed_ = test_seed();
  Rng rng_{seed_};
};

TEST_F(PlacementProperty, EveryRankHasOneSeatAndNoSeatTwoRanks) {
  for_random_deals([&](const PlacementRequest& q, const Placement& d) {
    ASSERT_EQ(static_cast<int>(d.ranks.size()), d.layout.world());
    std::set<std::pair<std::string, int>> seats;
    std::map<std::string, int> on_host, cores;
    for (const auto& w : q.workers)
      cores[w.host] = std::max(cores[w.host], w.cores);
    for (size_t r = 0; r < d.ranks.size(); ++r) {
      const pb::RankPlace& p = d.ranks[r];
      EXPECT_EQ(p.rank(), static_cast<int>(r));
      EXPECT_GE(p.local_slot(), 0);
      EXPECT_LT(p.local_slot(), worker(q, p.worker()).slots);
      EXPECT_TRUE(seats.insert({p.worker(), p.local_slot()}).second);
      ++on_host[worker(q, p.worker()).host];
    }
    for (const pb::RankPlace& p : d.ranks) {
      const std::string& h = worker(q, p.worker()).host;
      EXPECT_EQ(p.threads(), std::max(1, cores[h] / on_host[h]));
    }
    EXPECT_EQ(d.spares, slots_of(q) - d.layout.world());
  });
}

TEST_F(PlacementProperty, TheMeshKeepsToItsLimits) {
  for_random_deals([&](const PlacementRequest& q, const Placement& d) {
    EXPECT_GE(d.layout.world(), q.min_slots);
    EXPECT_LE(d.layout.dp, q.microbatches);
    if (q.max_slots != -1) {
      EXPECT_LE(d.layout.world(), q.max_slots);
    }
    if (q.degrees.dp != -1) {
      EXPECT_EQ(d.layout.dp, q.degrees.dp);
    } else {
      // One more would break a limit.
      const int unit = d.layout.world() / d.layout.dp;
      EXPECT_TRUE(d.layout.dp == q.microbatches ||
                  d.layout.world() + unit > slots_of(q) ||
                  (q.max_slots != -1 && d.layout.world() + unit > q.max_slots));
    }
    EXPECT_EQ(d.layout.tp, std::max(1, q.degrees.tp));
    EXPECT_EQ(d.layout.pp, std::max(1, q.degrees.pp));
  });
}

TEST_F(PlacementProperty, TheOrderOfTheInputDoesNotMatter) {
  for_random_deals([&](PlacementRequest q, const Placement& d) {
    std::shuffle(q.workers.begin(), q.workers.end(), rng_);
    std::shuffle(q.previous.begin(), q.previous.end(), rng_);
    ASSERT_OK_AND(const auto again, place_mesh(q));
    EXPECT_EQ(again.ranks, d.ranks);
    EXPECT_EQ(again.layout, d.layout);
    EXPECT_EQ(again.reason, d.reason);
  });
}

TEST_F(PlacementProperty, MoreSlotsNeverMakeFewerRanks) {
  for_random_deals([&](PlacementRequest q, const Placement& d) {
    if (pick(rng_, 0, 1) == 0)
      q.workers[static_cast<size_t>(
                    pick(rng_, 0, static_cast<int>(q.workers.size()) - 1))]
          .slots += pick(rng_, 1, 3);
    else
      q.workers.push_back({"new", "h1", pick(rng_, 1, 4), 2});
    ASSERT_OK_AND(const auto more, place_mesh(q));
    EXPECT_GE(more.layout.world(), d.layout.world());
  });
}

TEST_F(PlacementProperty, TheSameWorkersGetTheSameRanksAgain) {
  for_random_deals([&](PlacementRequest q, const Placement& d) {
    q.previous = d.ranks;
    EXPECT_EQ(place_mesh(q)->ranks, d.ranks);
  });
}

TEST_F(PlacementProperty, WhenAWorkerIsReplacedOnlyItsRanksMove) {
  for_random_deals([&](PlacementRequest q, const Placement& d) {
    q.previous = d.ranks;
    auto& gone = q.workers[static_cast<size_t>(
        pick(rng_, 0, static_cast<int>(q.workers.size()) - 1))];
    const std::string old_name = gone.worker;
    // Sorts first or last, and may be on another host.
    gone.worker = pick(rng_, 0, 1) == 0 ? "a" : "z";
    gone.host = "h" + std::to_string(pick(rng_, 0, 9));
    ASSERT_OK_AND(const auto next, place_mesh(q));
    ASSERT_EQ(next.layout, d.layout);
    for (size_t r = 0; r < d.ranks.size(); ++r) {
      if (d.ranks[r].worker() == old_name) continue;
      EXPECT_EQ(next.ranks[r].worker(), d.ranks[r].worker());
      EXPECT_EQ(next.ranks[r].local_slot(), d.ranks[r].local_slot());
    }
  });
}

TEST_F(PlacementProperty, WhenWorkersJoinThoseThereKeepTheirRanks) {
  for_random_deals([&](PlacementRequest q, const Placement& d) {
    if (d.layout.tp > 1 || !q.previous.empty()) return;
    q.previous = d.ranks;
    q.workers.push_back({"a", "a", 2, 2});  // sorts first
    ASSERT_OK_AND(const auto next, place_mesh(q));
    for (size_t r = 0; r < d.ranks.size(); ++r) {
      // Unless a worker that is there had spare slots, which fill first.
      if (d.spares > 0) continue;
      EXPECT_EQ(next.ranks[r].worker(), d.ranks[r].worker());
    }
  });
}

TEST_F(PlacementProperty, AsManyTensorGroupsSitOnOneHostAsCan) {
  for_random_deals([&](const PlacementRequest& q, const Placement& d) {
    if (!q.previous.empty()) return;
    std::map<std::string, int> slots;
    for (const auto& w : q.workers) slots[w.host] += w.slots;
    int can = 0;
    for (const auto& [host, n] : slots) can += n / d.layout.tp;
    int whole = 0;
    const auto tp = static_cast<size_t>(d.layout.tp);
    const size_t groups = d.ranks.size() / tp;
    for (size_t g = 0; g < groups; ++g) {
      std::set<std::string> hosts;
      for (size_t t = 0; t < tp; ++t)
        hosts.insert(worker(q, d.ranks.at(g * tp + t).worker()).host);
      if (hosts.size() == 1) ++whole;
    }
    EXPECT_EQ(whole, std::min(can, static_cast<int>(groups)));
  });
}

TEST_F(PlacementProperty, AWorkersRanksAreContiguousInAFreshMesh) {
  for_random_deals([&](const PlacementRequest& q, const Placement& d) {
    if (d.layout.tp > 1 || !q.previous.empty()) return;
    std::set<std::string> left;
    for (size_t r = 1; r < d.ranks.size(); ++r) {
      if (d.ranks[r].worker() == d.ranks[r - 1].worker()) continue;
      EXPECT_TRUE(left.insert(d.ranks[r - 1].worker()).second);
      EXPECT_EQ(left.count(d.ranks[r].worker()), 0U);
    }
  });
}

PlacementRequest two_workers() {
  return {.workers = {{"b", "h", 2, 4}, {"a", "h", 1, 4}}, .microbatches = 8};
}

TEST(Placement, SaysWhatItChoseAndWhy) {
  PlacementRequest q = two_workers();
  auto d = place_mesh(q);
  ASSERT_OK(d);
  EXPECT_EQ(d->reason, "dp3: 3 of 3 slots on 2 workers");
  EXPECT_EQ(d->ranks[0].ShortDebugString(),
            R"(rank: 0 worker: "a" local_slot: 0 threads: 1)");
  EXPECT_EQ(d->ranks[2].ShortDebugString(),
            R"(rank: 2 worker: "b" local_slot: 1 threads: 1)");
  q.max_slots = 2;
  d = place_mesh(q);
  EXPECT_EQ(d->reason,
            "dp2: 2 of 3 slots on 2 workers, 1 spare "
            "(elastic.max_slots = 2)");
  EXPECT_EQ(d->ranks[0].threads(), 2);
  q.max_slots = -1;
  q.microbatches = 1;
  EXPECT_EQ(place_mesh(q)->reason,
            "dp1: 1 of 3 slots on 1 worker, 2 spares (1 "
            "microbatch)");
}

TEST(Placement, RefusalsNameTheKeyAndWhatIsAllowed) {
  const auto expect_refusal = [](const PlacementRequest& q, Code code,
                                 const std::string& part) {
    const auto d = place_mesh(q);
    EXPECT_EQ(d.status().code(), code) << part;
    EXPECT_SAYS(d, part);
  };
  PlacementRequest q = two_workers();
  q.min_slots = 5;
  expect_refusal(q, Code::kExhausted,
                 "too few slots: 3 offered (a: 1, b: 2), needs 5 "
                 "(elastic.min_slots)");
  q = two_workers();
  q.workers.clear();
  expect_refusal(q, Code::kExhausted, "0 offered (no workers)");
  q = two_workers();
  q.degrees.dp = 4;
  expect_refusal(q, Code::kExhausted, "needs 4 (the degrees in [parallel])");
  q.degrees.dp = 9;
  expect_refusal(q, Code::kInvalidArgument, "set 1 to 8, or -1");
  q.degrees.dp = 0;
  expect_refusal(q, Code::kInvalidArgument, "at least 1, or -1");
  q = two_workers();
  q.min_slots = 9;
  expect_refusal(q, Code::kInvalidArgument,
                 "elastic.min_slots = 9: the mesh has at most 8 ranks");
  q.min_slots = 2;
  q.max_slots = 1;
  expect_refusal(q, Code::kInvalidArgument, "elastic.max_slots = 1");
  q = two_workers();
  q.workers.push_back(q.workers[0]);
  expect_refusal(q, Code::kInvalidArgument, "duplicate worker name 'b'");
}

}  // namespace
}  // namespace remesh::planner
