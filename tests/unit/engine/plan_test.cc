#include "worker/engine/plan.h"

#include <gtest/gtest.h>

#include <set>

#include "parallel/geometry/batch.h"

namespace remesh::engine {
namespace {

using geometry::Pass;
using geometry::PipeOp;
using geometry::ScheduleKind;

const ScheduleKind kKinds[] = {ScheduleKind::kGpipe, ScheduleKind::k1F1B,
                               ScheduleKind::kInterleaved1F1B,
                               ScheduleKind::kZbH1};

TEST(Plan, HasAPassForEveryMicrobatchThatAnyRankIsDealt) {
  for (const ScheduleKind kind : kKinds)
    for (int pp = 1; pp <= 4; ++pp)
      for (int chunks = 1; chunks <= 3; ++chunks)
        for (int64_t n = 1; n <= 9; ++n)
          for (int dp = 1; dp <= 4; ++dp) {
            const auto plan = plan_step(kind, pp, chunks, n, dp);
            if (chunks > 1 && kind != ScheduleKind::kInterleaved1F1B) {
              EXPECT_FALSE(plan.ok());
              continue;
            }
            ASSERT_TRUE(plan.ok()) << plan.status().to_string();
            const int64_t most = geometry::deal(n, dp, 0).size();
            EXPECT_GE(plan->num_microbatches, most);
            EXPECT_LT(plan->num_microbatches, most + (chunks > 1 ? pp : 1));
            EXPECT_TRUE(geometry::simulate(plan->schedule, {}).ok());
          }
}

// The passes that are left when the last microbatches are skipped can still
// finish, on paper: whatever order they wait in, some rank can go on.
TEST(Plan, LeavingOutMicrobatchesDeadlocksNoSchedule) {
  for (const ScheduleKind kind : kKinds)
    for (const int pp : {2, 3, 4})
      for (const int chunks : {1, 2})
        for (int missing = 0; missing < 4; ++missing) {
          const auto plan = plan_step(
              kind, pp, kind == ScheduleKind::kInterleaved1F1B ? chunks : 1,
              2 * pp, 1);
          ASSERT_TRUE(plan.ok());
          const int v = plan->schedule.chunks;
          auto left = plan->schedule.ranks;
          for (auto& ops : left)
            std::erase_if(ops, [&](const PipeOp& op) {
              return op.microbatch >= 2 * pp - missing;
            });
          std::set<std::tuple<Pass, int, int>> done;  // pass, stage, microbatch
          std::vector<size_t> at(left.size(), 0);
          for (bool moved = true; moved;) {
            moved = false;
            for (int r = 0; r < pp; ++r) {
              auto& ops = left[static_cast<size_t>(r)];
              size_t& next = at[static_cast<size_t>(r)];
              if (next == ops.size()) continue;
              const PipeOp op = ops[next];
              const int s = op.chunk * pp + r;
              const bool can =
                  op.pass == Pass::kForward
                      ? s == 0 || done.contains({op.pass, s - 1, op.microbatch})
                  : op.pass == Pass::kBackward
                      ? s == pp * v - 1 ||
                            done.contains({op.pass, s + 1, op.microbatch})
                      : true;
              if (!can) continue;
              done.insert({op.pass, s, op.microbatch});
              ++next;
              moved = true;
            }
          }
          for (size_t r = 0; r < left.size(); ++r)
            EXPECT_EQ(at[r], left[r].size())
                << geometry::schedule_name(kind) << " pp " << pp << " missing "
                << missing << " rank " << r;
        }
}

TEST(Plan, SlotsAreThePeakOfTheSimulation) {
  for (const ScheduleKind kind : kKinds)
    for (const int pp : {1, 2, 4}) {
      const auto plan = plan_step(kind, pp, 1, 8, 1);
      ASSERT_TRUE(plan.ok());
      const auto timing = geometry::simulate(plan->schedule, {});
      for (int r = 0; r < pp; ++r)
        EXPECT_EQ(slots_needed(plan->schedule, plan->ops(r))[0],
                  timing->peak_live[static_cast<size_t>(r)]);
    }
  // With chunks each has its own; together no more than the rank's peak each.
  const auto plan = plan_step(ScheduleKind::kInterleaved1F1B, 2, 2, 8, 1);
  EXPECT_EQ(slots_needed(plan->schedule, plan->ops(0)),
            (std::vector<int>{4, 2}));
}

TEST(Plan, EvaluationHasForwardPassesOnly) {
  for (const int chunks : {1, 2})
    for (const int64_t n : {0, 1, 3, 8}) {
      const StepPlan plan = plan_evaluation(2, chunks, n);
      EXPECT_GE(plan.num_microbatches, n);
      for (int r = 0; r < 2; ++r) {
        EXPECT_EQ(plan.ops(r).size(),
                  static_cast<size_t>(plan.num_microbatches * chunks));
        for (const PipeOp& op : plan.ops(r)) EXPECT_EQ(op.pass, Pass::kForward);
      }
    }
}

TEST(Plan, GlobalUnitsNumberTheModel) {
  const auto table = geometry::ParamTable::make({.dim = 16,
                                                  .n_layers = 5,
                                                  .n_heads = 2,
                                                  .n_kv_heads = 1,
                                                  .hidden_dim = 20,
                                                  .vocab_size = 30});
  const geometry::StageBounds bounds{0, 1, 3, 4, 5};
  std::set<int64_t> seen;
  for (int r = 0; r < 2; ++r) {
    const auto shard =
        geometry::ShardTable::make(table, {.pp = 2}, {.pp = r}, bounds, 2);
    ASSERT_TRUE(shard.ok());
    for (size_t u = 0; u < shard->units().size(); ++u)
      EXPECT_TRUE(seen.insert(global_unit(*shard, u)).second);
    // Forward goes through a chunk's units, backward returns.
    auto forward = units_needed(*shard, {Pass::kForward, 0, 1});
    const auto backward = units_needed(*shard, {Pass::kBackward, 0, 1});
    std::reverse(forward.begin(), forward.end());
    EXPECT_EQ(forward, backward);
    EXPECT_TRUE(units_needed(*shard, {Pass::kWeight, 0, 1}).empty());
  }
  EXPECT_EQ(static_cast<int64_t>(seen.size()),
            num_global_units(table.config()));
  EXPECT_EQ(*seen.begin(), 0);
}

}  // namespace
}  // namespace remesh::engine
