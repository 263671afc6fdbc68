// Sharding: what a rank's vectors hold, piece by piece, and which ranks hold
// the same.
#include "parallel/geometry/sharding.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "tests/testing/expect.h"
#include "tests/testing/llama.h"
#include "tests/testing/pieces.h"
#include "tests/testing/random_mesh.h"
#include "tests/testing/seed.h"

namespace remesh::geometry {
namespace {

// Every position of the vectors belongs to one piece; ranks hold the same
// pieces when they are in one replica group; together the groups hold every
// element of the model.
TEST(Sharding, PiecesFillTheVectorsAndReplicaGroupsHoldTheSame) {
  std::mt19937 random(test_seed());
  for (int i = 0; i < 100; ++i) {
    const ParamTable table = ParamTable::make(random_config(random));
    const Sharding s = random_sharding(random, table.config(), 96);
    std::map<int, std::vector<Piece>> of_group;
    std::set<std::pair<size_t, int64_t>> held;
    for (int r = 0; r < s.layout.world(); ++r) {
      ASSERT_OK_AND(const auto mine, make_rank_shard(table, s, r));
      const auto pieces = held_pieces(mine);
      std::vector<int> count(static_cast<size_t>(mine.zero.state_elements()),
                             0);
      for_each_element(table, pieces, [&](int64_t at, size_t param, int64_t e) {
        ++count[static_cast<size_t>(at)];
        held.emplace(param, e);
      });
      for (const int n : count) ASSERT_EQ(n, 1);
      const int c = replica_group(s, r);
      ASSERT_LT(c, num_replica_groups(s));
      const auto [it, fresh] = of_group.emplace(c, pieces);
      ASSERT_EQ(it->second, pieces) << s.layout.to_string() << " rank " << r;
      if (fresh) {
        EXPECT_EQ(first_rank_of_group(s, c), r);
      }
    }
    EXPECT_EQ(static_cast<int>(of_group.size()), num_replica_groups(s));
    EXPECT_EQ(static_cast<int64_t>(held.size()), table.num_elements());
  }
}

// Twin: the set of all elements.
TEST(Sharding, AStateIsCompleteWhenEveryElementIsHeld) {
  std::mt19937 random(test_seed());
  int whole_ones = 0, torn = 0;
  for (int i = 0; i < 400; ++i) {
    const ParamTable table = ParamTable::make(random_config(random));
    const Sharding s = random_sharding(random, table.config(), 96);
    std::vector<int> ranks;
    std::vector<std::vector<bool>> held;
    for (const ParamSpec& p : table.specs())
      held.emplace_back(static_cast<size_t>(p.numel()), false);
    for (int r = 0; r < s.layout.world(); ++r) {
      if (random() % 12 == 0) continue;
      ranks.push_back(r);
      const auto mine = make_rank_shard(table, s, r);
      for_each_element(table, held_pieces(*mine),
                       [&](int64_t, size_t param, int64_t e) {
                         held[param][static_cast<size_t>(e)] = true;
                       });
    }
    bool all = true;
    for (const auto& h : held)
      all = all && std::find(h.begin(), h.end(), false) == h.end();
    const Status found = check_complete(table, s, ranks);
    ASSERT_EQ(found.ok(), all) << found.to_string();
    if (!all) {
      ASSERT_EQ(found.code(), Code::kUnavailable);
    }
    ++(all ? whole_ones : torn);
  }
  EXPECT_GT(whole_ones, 20);
  EXPECT_GT(torn, 20);
}

TEST(Sharding, ARankThatHoldsNothingMayBeMissing) {
  const ParamTable table =
      ParamTable::make(llama(8, 2, 2, 1, 8, 16, /*tied=*/true));
  // Shares have at least 16 elements: the last ranks have none.
  const Sharding many{
      .layout = {.dp = 64}, .bounds = {0, 2}, .zero = {.stage = 1}};
  std::vector<int> ranks;
  for (int r = 0; r < 40; ++r) ranks.push_back(r);
  EXPECT_OK(check_complete(table, many, ranks));
  ranks.erase(ranks.begin());
  EXPECT_EQ(check_complete(table, many, ranks).code(), Code::kUnavailable);
  EXPECT_EQ(check_complete(table, many, {}).code(), Code::kUnavailable);
  const std::vector<int> none_such = {64};
  EXPECT_EQ(check_complete(table, many, none_such).code(),
            Code::kInvalidArgument);
}

TEST(Sharding, ARankOutsideTheMeshIsRefused) {
  const ParamTable table = ParamTable::make(llama(8, 2, 2, 1, 8, 16));
  const Sharding s{.layout = {.dp = 2}, .bounds = {0, 2}};
  EXPECT_OK(make_rank_shard(table, s, 1));
  EXPECT_FALSE(make_rank_shard(table, s, 2).ok());
  EXPECT_FALSE(make_rank_shard(table, s, -1).ok());
  Sharding no_bounds = s;
  no_bounds.bounds = {0, 1};
  EXPECT_FALSE(make_rank_shard(table, no_bounds, 0).ok());
}

TEST(Sharding, ModelsOfDifferentShapesHaveDifferentIds) {
  ModelConfig c = llama(8, 2, 2, 1, 8, 16);
  const uint64_t id = model_id(ParamTable::make(c));
  EXPECT_EQ(model_id(ParamTable::make(c)), id);
  c.n_layers = 3;
  EXPECT_NE(model_id(ParamTable::make(c)), id);
  c.n_layers = 2;
  c.vocab_size = 17;
  EXPECT_NE(model_id(ParamTable::make(c)), id);
}

}  // namespace
}  // namespace remesh::geometry
