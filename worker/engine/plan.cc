#include "worker/engine/plan.h"

#include <algorithm>

#include "parallel/geometry/batch.h"
#include "proto/base/check.h"

namespace remesh::engine {

using geometry::Pass;
using geometry::PipeOp;
using geometry::UnitKind;

namespace {

int64_t rounded_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

}  // namespace

Result<StepPlan> plan_step(geometry::ScheduleKind kind, int pp, int chunks,
                           int64_t num_microbatches, int dp) {
  CHECK(num_microbatches >= 1);
  int64_t n = geometry::even_share(num_microbatches, dp, 0).size();
  if (chunks > 1) n = rounded_up(n, pp);
  StepPlan plan{.num_microbatches = static_cast<int>(n)};
  ASSIGN_OR_RETURN(plan.schedule, geometry::make_schedule(
                                      kind, pp, plan.num_microbatches, chunks));
  return plan;
}

StepPlan plan_evaluation(int pp, int chunks, int64_t n) {
  StepPlan plan =
      plan_step(chunks > 1 ? geometry::ScheduleKind::kInterleaved1F1B
                           : geometry::ScheduleKind::k1F1B,
                pp, chunks, std::max<int64_t>(1, n), 1)
          .value();
  for (auto& ops : plan.schedule.ranks)
    std::erase_if(ops,
                  [](const PipeOp& op) { return op.pass != Pass::kForward; });
  return plan;
}

std::vector<int> slots_needed(const geometry::Schedule& schedule,
                              const std::vector<PipeOp>& ops) {
  const auto chunks = static_cast<size_t>(schedule.chunks);
  std::vector<int> live(chunks, 0);
  std::vector<int> most(chunks, 1);
  const Pass last = schedule.split_backward ? Pass::kWeight : Pass::kBackward;
  for (const PipeOp& op : ops) {
    const auto c = static_cast<size_t>(op.chunk);
    if (op.pass == Pass::kForward) most[c] = std::max(most[c], ++live[c]);
    if (op.pass == last) --live[c];
  }
  return most;
}

std::vector<int> units_needed(const geometry::ShardTable& shard,
                              const PipeOp& op) {
  std::vector<int> units;
  if (op.pass == Pass::kWeight) return units;
  for (size_t u = 0; u < shard.units().size(); ++u)
    if (shard.units()[u].chunk == op.chunk)
      units.push_back(static_cast<int>(u));
  if (op.pass == Pass::kBackward) std::reverse(units.begin(), units.end());
  return units;
}

std::vector<int> blocks_needed(const geometry::ShardTable& shard,
                               const std::vector<PipeOp>& ops) {
  std::vector<int> blocks;
  for (const PipeOp& op : ops)
    for (const int u : units_needed(shard, op))
      if (shard.units()[static_cast<size_t>(u)].kind == UnitKind::kBlock)
        blocks.push_back(u);
  return blocks;
}

int64_t global_unit(const geometry::ShardTable& shard, size_t unit) {
  const geometry::Unit& u = shard.units()[unit];
  switch (u.kind) {
    case UnitKind::kEmbedding:
      return 0;
    case UnitKind::kBlock:
      return u.layer + 1;
    case UnitKind::kHead:
      return shard.table().config().n_layers + 1;
  }
  CHECK_MSG(false, "unknown unit");
  return 0;
}

}  // namespace remesh::engine
