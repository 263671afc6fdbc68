// ShardTable and ZeroPlan: over a mesh every element is owned exactly once.
#include "parallel/geometry/shard_table.h"

#include <map>
#include <random>

#include "parallel/geometry/zero.h"
#include "tests/testing/expect.h"
#include "tests/testing/initial_value.h"
#include "tests/testing/llama.h"
#include "tests/testing/pieces.h"
#include "tests/testing/random_mesh.h"
#include "tests/testing/seed.h"

namespace remesh::geometry {
namespace {

// How often each element of each parameter is held.
using Counts = std::vector<std::vector<int>>;

void count(const ParamTable& table, const std::vector<Piece>& pieces,
           Counts& counts) {
  for_each_element(table, pieces, [&](int64_t, size_t param, int64_t e) {
    ++counts[param][static_cast<size_t>(e)];
  });
}

Counts no_counts(const ParamTable& table) {
  Counts c;
  for (const ParamSpec& s : table.specs())
    c.emplace_back(static_cast<size_t>(s.numel()), 0);
  return c;
}

TEST(ShardTable, OneRankHoldsTheParamTable) {
  std::mt19937 random(1);
  for (int i = 0; i < 20; ++i) {
    const ParamTable table = ParamTable::make(random_config(random));
    ASSERT_OK_AND(const auto t, ShardTable::make(table, {}, {},
                                                 {0, table.config().n_layers}));
    ASSERT_EQ(t.size(), table.size());
    EXPECT_EQ(t.num_elements(), table.num_elements());
    for (size_t k = 0; k < table.size(); ++k) {
      EXPECT_EQ(t[k].param, k);
      EXPECT_EQ(t[k].offset, table.offset(k));
      EXPECT_TRUE(t[k].owner);
    }
  }
}

TEST(ShardTable, EveryElementIsOwnedOnceAndNormsCountItOnce) {
  const uint32_t seed = test_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  int done = 0;
  while (done < 150) {
    const ParamTable table = ParamTable::make(random_config(random));
    Layout layout{.dp = 1 + static_cast<int>(random() % 3),
                  .pp = 1 + static_cast<int>(random() % 4),
                  .tp = 1 << random() % 4,
                  .cp = 1 + static_cast<int>(random() % 2)};
    const int chunks = layout.pp > 1 ? 1 + static_cast<int>(random() % 2) : 1;
    const auto bounds = stage_bounds(table.config(), layout.pp * chunks, 8);
    if (!bounds.ok() || !validate_layout(table.config(), layout).ok()) continue;
    ++done;
    Counts owned = no_counts(table);
    Counts counted = no_counts(table);
    std::map<int, std::vector<float>> held;
    const int n = layout.dp * layout.cp;
    const int z = n % 2 == 0 && random() % 2 == 0 ? 2 : 0;
    const ZeroOptions zero{.stage = static_cast<int>(random() % 4),
                           .shard_group = z};
    for (int r = 0; r < layout.world(); ++r) {
      const Coord me = layout.coord(r);
      ASSERT_OK_AND(const auto t,
                    ShardTable::make(table, layout, me, *bounds, chunks));
      if (me.dp == 0 && me.cp == 0)
        count(table, t.pieces(0, t.num_elements(), /*owned=*/true), owned);
      ASSERT_OK_AND(const auto plan,
                    ZeroPlan::make(t, zero, n, me.dp * layout.cp + me.cp));
      int64_t at = 0;
      for (size_t u = 0; u < t.units().size(); ++u) {
        EXPECT_EQ(t.units()[u].begin, at);
        at = t.units()[u].end;
        const FlatRange norm = plan.norm_range(u);
        const FlatRange update = plan.update_range(u);
        EXPECT_GE(norm.begin, update.begin);
        EXPECT_LE(norm.end, update.end);
        count(table, t.pieces(norm.begin, norm.end, /*owned=*/true), counted);
      }
      EXPECT_EQ(at, t.num_elements());
      // Initial values equal those of the table.
      std::vector<float> values(static_cast<size_t>(t.num_elements()));
      t.initial_values(7, 0, values);
      const int64_t e = static_cast<int64_t>(random()) % t.num_elements();
      const Piece p = t.pieces(e, e + 1)[0];
      const int64_t global =
          p.rect.row * table[p.param].shape.back() + p.rect.col;
      EXPECT_EQ(values[static_cast<size_t>(e)],
                initial_value(table[p.param], 7, global));
    }
    for (size_t i = 0; i < table.size(); ++i)
      for (size_t e = 0; e < owned[i].size(); ++e) {
        ASSERT_EQ(owned[i][e], 1)
            << table[i].name << " " << e << " " << layout.to_string();
        ASSERT_EQ(counted[i][e], 1)
            << table[i].name << " " << e << " " << layout.to_string();
      }
  }
}

TEST(ShardTable, EveryStageHasALayer) {
  const ParamTable table = ParamTable::make(llama(8, 2, 2, 2, 8, 8));
  const auto make = [&](const StageBounds& bounds) {
    return ShardTable::make(table, {.pp = 2}, {.pp = 1}, bounds).ok();
  };
  EXPECT_TRUE(make({0, 1, 2}));
  for (const StageBounds& bounds :
       {StageBounds{0, 2, 2}, StageBounds{0, 0, 2}, StageBounds{0, 3, 2},
        StageBounds{0, -1, 2}})
    EXPECT_FALSE(make(bounds)) << bounds[1];
}

TEST(ShardTable, KeysAndValuesAreSharedWhenRanksOutnumberHeads) {
  const ParamTable table = ParamTable::make(llama(32, 1, 8, 2, 16, 16));
  for (int tp = 0; tp < 8; ++tp) {
    ASSERT_OK_AND(const auto t, ShardTable::make(table, {.tp = 8}, {.tp = tp},
                                                 StageBounds{0, 1}));
    const ShardParam& k = t[static_cast<size_t>(t.find(Role::kKey, 0))];
    EXPECT_EQ(k.tp_group, 4);
    EXPECT_EQ(k.rect.row, tp / 4 * 4);
    EXPECT_EQ(k.owner, tp % 4 == 0);
  }
  EXPECT_FALSE(ShardTable::make(table, {.tp = 3}, {}, StageBounds{0, 1}).ok());
}

TEST(Zero, ErrorsNameTheAllowedValues) {
  const ParamTable table = ParamTable::make(llama(8, 1, 2, 2, 8, 8));
  ASSERT_OK_AND(const auto t,
                ShardTable::make(table, {.dp = 6}, {}, StageBounds{0, 1}));
  EXPECT_FALSE(ZeroPlan::make(t, {.stage = 4}, 6, 0).ok());
  EXPECT_FALSE(ZeroPlan::make(t, {.stage = 1, .shard_group = 4}, 6, 0).ok());
  ASSERT_OK_AND(const auto p,
                ZeroPlan::make(t, {.stage = 1, .shard_group = 3}, 6, 4));
  EXPECT_EQ(p.shard_index(), 1);
  EXPECT_EQ(p.replica_index(), 1);
}

}  // namespace
}  // namespace remesh::geometry
