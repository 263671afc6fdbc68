// Which units of a rank's shard table the passes of a schedule compute with.
// Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "parallel/geometry/schedule.h"
#include "parallel/geometry/shard_table.h"

namespace remesh::engine {

// The blocks (as units of the shard table) that the passes compute with, in
// order. Passes that compute only weight gradients need none.
std::vector<int> blocks_needed(const geometry::ShardTable& shard,
                               const std::vector<geometry::PipeOp>& ops);
// The same for one pass, including embedding and head.
std::vector<int> units_needed(const geometry::ShardTable& shard,
                              const geometry::PipeOp& op);

// The index among all units of the model (embedding, blocks by layer, head) of
// a unit of any rank's shard table.
int64_t global_unit(const geometry::ShardTable& shard, size_t unit);
inline int64_t num_global_units(const geometry::ModelConfig& config) {
  return config.n_layers + 2;
}

}  // namespace remesh::engine
