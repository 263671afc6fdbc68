#include "worker/engine/units_needed.h"

#include <algorithm>

#include "proto/base/check.h"

namespace remesh::engine {

using geometry::Pass;
using geometry::PipeOp;
using geometry::UnitKind;

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
