// What a step does on one rank, as data: passes, activation slots, the weights
// they need. Pure.
//
// All data-parallel ranks of a step walk the same list of passes, made for the
// largest number of microbatches that any of them has. A rank with fewer skips
// the passes of microbatches it has not (it is the last ones that are missing,
// and leaving out a whole microbatch breaks no dependency of a schedule). So
// uneven shares fit every schedule, also interleaved 1F1B, which needs a
// multiple of pp: its lists are made for the next one.
#pragma once

#include <cstdint>
#include <vector>

#include "parallel/geometry/schedule.h"
#include "parallel/geometry/shard_table.h"

namespace remesh::engine {

struct StepPlan {
  geometry::Schedule schedule;
  // Microbatches in the lists; at least what any rank has.
  int num_microbatches = 1;
  const std::vector<geometry::PipeOp>& ops(int pp_rank) const {
    return schedule.ranks[static_cast<size_t>(pp_rank)];
  }
};

// For a global batch of `num_microbatches` dealt to `dp` ranks
// (geometry::deal). Fails as make_schedule() does.
Result<StepPlan> plan_step(geometry::ScheduleKind kind, int pp, int chunks,
                           int64_t num_microbatches, int dp);

// Forward passes alone, of n microbatches, in an order that every rank of the
// pipeline can keep to. As in a step the list may be longer than n.
StepPlan plan_evaluation(int pp, int chunks, int64_t n);

// Most microbatches of each chunk whose activations are held at once, when the
// passes are run in this order.
std::vector<int> slots_needed(const geometry::Schedule& schedule,
                              const std::vector<geometry::PipeOp>& ops);

// The blocks (as units of the shard table) that the passes compute with, in
// order. Passes that make weight gradients alone need none.
std::vector<int> blocks_needed(const geometry::ShardTable& shard,
                               const std::vector<geometry::PipeOp>& ops);
// ... one pass, with embedding and head where it computes with them.
std::vector<int> units_needed(const geometry::ShardTable& shard,
                              const geometry::PipeOp& op);

// Number of a unit of any rank's shard table among all units of the model:
// embedding, blocks by layer, head.
int64_t global_unit(const geometry::ShardTable& shard, size_t unit);
inline int64_t num_global_units(const geometry::ModelConfig& config) {
  return config.n_layers + 2;
}

}  // namespace remesh::engine
