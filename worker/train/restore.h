// Restore: the state a generation begins with, fresh or from a checkpoint.
//
// Each rank makes or reads its share, then all shares are gathered: N ranks
// need a N-th of the time. The result is the same on any mesh.
//
// Collective over `comm`, whose ranks each hold all of the state. `tick` runs
// as it goes on, in the calling thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "checkpoint/manifest/file_system.h"
#include "checkpoint/manifest/manifest.h"
#include "parallel/comm/comm.h"
#include "parallel/geometry/param_table.h"
#include "proto/base/status.h"
#include "worker/train/share.h"
#include "worker/train/state.h"

namespace remesh::train {

// Writes the initial weights (ParamTable::initial_value) of `share` into `out`
// (flat, whole vector), with `threads` OpenMP threads.
void fill_initial_weights(const geometry::ParamTable& table, uint64_t seed,
                          const Share& share, int threads,
                          std::span<float> out);

// Fills in the other ranks' shares. REQUIRES: this rank's is there.
void gather_shares(comm::Comm& comm, FlatBuffer& buffer);

// Loads the checkpoint directory `path` and returns its manifest. Fails on all
// ranks when it fails on one: kInvalidArgument when the checkpoint is sound but
// of another job (each difference named) or step, else why it does not load.
Result<pb::Manifest> load_checkpoint(
    manifest::FileSystem& fs, const std::string& path, int64_t step,
    const geometry::ParamTable& table, const manifest::JobFacts& job,
    comm::Comm& comm, const std::function<void()>& tick, TrainState& state);

}  // namespace remesh::train
