// Restore: the state a generation begins with, fresh or from a checkpoint, on
// any mesh, whatever mesh wrote it.
//
// Each rank makes or reads its part (pieces_to_load), then replicas exchange
// theirs: N replicas need a N-th of the time. The result is the same on any
// mesh.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "checkpoint/manifest/manifest.h"
#include "parallel/comm/comm.h"
#include "parallel/geometry/param_table.h"
#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "worker/engine/state_store.h"
#include "worker/train/rank_state.h"

namespace remesh::train {

// Writes the initial weights (ParamTable::initial_value) of this rank's part
// into its state vector `weights`, with `threads` OpenMP threads. The rest
// comes with exchange_parts().
void fill_initial_weights(const geometry::ShardTable& shard,
                          const geometry::ZeroPlan& zero, uint64_t seed,
                          int threads, std::span<float> weights);

// Fills in the parts of this rank's replicas in a state vector. Collective over
// `data`, the data group of the plan. REQUIRES: this rank's part is there.
void exchange_parts(comm::Comm& data, const geometry::ShardTable& shard,
                    const geometry::ZeroPlan& zero, std::span<float> vector);

// Loads the checkpoint directory `path` into the vectors of this rank, `to`,
// and returns its manifest.
// Fails on all ranks when it fails on one: kInvalidArgument when the checkpoint
// is sound but of another job (each difference named) or step, else why it does
// not load. Collective over `world`, of which `data` is this rank's data group.
// `tick` runs as it goes on, in the calling thread.
Result<pb::Manifest> load_checkpoint(
    FileSystem& fs, const std::string& path, int64_t step,
    const manifest::JobFacts& job, comm::Comm& world, comm::Comm& data,
    const std::function<void()>& tick, const geometry::ShardTable& shard,
    const geometry::ZeroPlan& zero, const engine::StateView& to);

}  // namespace remesh::train
