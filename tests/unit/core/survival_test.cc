// Whether a state survives on some hosts, against the choice that the next
// generation would make there.
#include "coordinator/core/survival.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "checkpoint/memory/replica_placement.h"
#include "coordinator/core/job_shape.h"
#include "coordinator/core/state_choice.h"
#include "tests/testing/llama.h"
#include "tests/testing/seed.h"

namespace remesh::core {
namespace {

using geometry::ParamTable;

// Ranks of a random mesh on random workers; those of a host are neighbours.
pb::Assignment random_assignment(std::mt19937_64& rng) {
  const auto pick = [&](uint64_t n) { return static_cast<int>(rng() % n); };
  pb::Assignment a;
  a.mutable_mesh()->set_dp(1 + pick(4));
  a.mutable_mesh()->set_pp(1 + pick(2));
  a.mutable_mesh()->set_tp(1 + pick(2));
  auto* parallel = a.mutable_job()->mutable_parallel();
  parallel->set_zero_stage(pick(3));
  if (parallel->zero_stage() > 0 && a.mesh().dp() == 4)
    parallel->set_zero_shard_group(1 << pick(3));
  auto* elastic = a.mutable_job()->mutable_elastic();
  elastic->set_replicas(pick(3));
  elastic->set_replicate_every(pick(3));
  const int workers = 1 + pick(5);
  const int hosts = 1 + pick(static_cast<uint64_t>(workers));
  for (int w = 0; w < workers; ++w) {
    a.add_workers(fmt::format("w{}", w));
    a.add_hosts(fmt::format("h{}", w % hosts));
  }
  for (int r = 0; r < layout_of(a.mesh()).world(); ++r) {
    pb::RankPlace* p = a.add_ranks();
    p->set_rank(r);
    p->set_worker(a.workers(pick(static_cast<uint64_t>(workers))));
  }
  return a;
}

// What lies where when the ranks have stopped at step 7.
Inventory left_by(const pb::Assignment& a, const ParamTable& table) {
  geometry::Sharding cut = sharding_of(a);
  cut.bounds = cut.layout.pp == 1 ? geometry::StageBounds{0, 2}
                                  : geometry::StageBounds{0, 1, 2};
  std::map<std::string, std::string> host;
  for (int i = 0; i < a.workers_size(); ++i) host[a.workers(i)] = a.hosts(i);
  std::vector<memory::RankHost> places;
  std::vector<int> classes;
  for (const pb::RankPlace& p : a.ranks()) {
    places.push_back({p.worker(), host[p.worker()]});
    classes.push_back(geometry::replica_group(cut, p.rank()));
  }
  const auto& e = a.job().elastic();
  const auto replicas = memory::place_replicas(
      places, classes,
      e.replicate_every() == 0 ? 0 : static_cast<int>(e.replicas()));
  Inventory in;
  const auto add = [&](int rank, size_t at, bool replica) {
    pb::StateHolding h;
    h.set_worker(places[at].worker);
    h.set_host(places[at].host);
    h.set_step(7);
    h.set_generation(1);
    h.set_rank(rank);
    h.set_model(geometry::model_id(table));
    h.set_elements(
        geometry::make_rank_shard(table, cut, rank)->zero.state_elements());
    h.set_replica(replica);
    in.holdings.push_back({h, cut});
  };
  for (size_t r = 0; r < places.size(); ++r) {
    add(static_cast<int>(r), r, false);
    for (const int holder : replicas.holders[r])
      add(static_cast<int>(r), static_cast<size_t>(holder), true);
  }
  return in;
}

TEST(Survival, PredictsWhatTheNextGenerationFinds) {
  const uint64_t seed = test_seed();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937_64 rng(seed);
  // No shared parameters, and shares enough for everybody: no state without
  // something of its own.
  const ParamTable table =
      ParamTable::make(geometry::llama(32, 2, 2, 2, 64, 64));
  int survived = 0;
  constexpr int kRounds = 1500;
  for (int round = 0; round < kRounds; ++round) {
    const pb::Assignment a = random_assignment(rng);
    Inventory in = left_by(a, table);
    for (const std::string& h : a.hosts())
      if (rng() % 3 != 0) in.hosts.insert(h);
    if (in.hosts.empty()) in.hosts.insert("elsewhere");
    const bool found = choose_state(&table, in).kind == pb::Source::MEMORY;
    ASSERT_EQ(survives_on(a, in.hosts), found)
        << round << ": " << a.ShortDebugString() << " on "
        << fmt::format("{}", fmt::join(in.hosts, ", "));
    survived += found ? 1 : 0;
    const std::set<std::string> all(a.hosts().begin(), a.hosts().end());
    for (const std::string& h : all) {
      in.hosts = all;
      in.hosts.erase(h);
      if (in.hosts.empty()) in.hosts.insert("elsewhere");
      ASSERT_EQ(needed_hosts(a).contains(h),
                choose_state(&table, in).kind != pb::Source::MEMORY)
          << round << ": " << a.ShortDebugString() << " without " << h;
    }
  }
  EXPECT_GT(survived, kRounds / 5);
  EXPECT_LT(survived, kRounds * 4 / 5 + kRounds / 10);
}

}  // namespace
}  // namespace remesh::core
