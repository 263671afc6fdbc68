#include "worker/engine/units_needed.h"

#include "tests/testing/expect.h"
#include "tests/testing/llama.h"

namespace remesh::engine {
namespace {

using geometry::Pass;
using geometry::PipeOp;

TEST(UnitsNeeded, GlobalUnitsNumberTheModel) {
  const auto table =
      geometry::ParamTable::make(geometry::llama(16, 5, 2, 1, 20, 30));
  const geometry::StageBounds bounds{0, 1, 3, 4, 5};
  std::set<int64_t> seen;
  for (int r = 0; r < 2; ++r) {
    ASSERT_OK_AND(
        const auto shard,
        geometry::ShardTable::make(table, {.pp = 2}, {.pp = r}, bounds, 2));
    for (size_t u = 0; u < shard.units().size(); ++u)
      EXPECT_TRUE(seen.insert(global_unit(shard, u)).second);
    // Forward goes through a chunk's units, backward returns.
    auto forward = units_needed(shard, {Pass::kForward, 0, 1});
    const auto backward = units_needed(shard, {Pass::kBackward, 0, 1});
    std::reverse(forward.begin(), forward.end());
    EXPECT_EQ(forward, backward);
    EXPECT_TRUE(units_needed(shard, {Pass::kWeight, 0, 1}).empty());
  }
  EXPECT_EQ(static_cast<int64_t>(seen.size()),
            num_global_units(table.config()));
  EXPECT_EQ(*seen.begin(), 0);
}

}  // namespace
}  // namespace remesh::engine
