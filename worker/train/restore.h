// Restore: the initial state of a generation, either new or from a checkpoint
// that any mesh wrote.
//
// Each rank creates or reads its part (pieces_to_load), then data-parallel
// replicas exchange their parts, so that N replicas need 1/N of the time. The
// result does not depend on the mesh.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "checkpoint/manifest/manifest.h"
#include "parallel/comm/mesh.h"
#include "parallel/geometry/param_table.h"
#include "parallel/geometry/sharding.h"
#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "worker/engine/state_store.h"

namespace remesh::train {

// Writes the initial weights (ShardTable::initial_values) of this rank's part
// into its state vector `weights`, with `threads` OpenMP threads.
// exchange_parts() supplies the rest.
void fill_initial_weights(const geometry::RankShard& rank, uint64_t seed,
                          int threads, std::span<float> weights);

// The same with the weights that `path` has (huggingface/weight_source.h).
// Calls `tick` on progress. InvalidArgument if there are none of this model:
// that will not change. `fingerprint`, of a frozen model: that which the
// weights must have, "" for any, and is replaced by theirs.
Status load_initial_weights(FileSystem& fs, const std::string& path,
                            const geometry::RankShard& rank,
                            const std::function<void()>& tick,
                            std::span<float> weights,
                            std::string* fingerprint = nullptr);

// Fills a state vector with the parts of the other replicas. Collective over
// `data`, the data group of the plan. Calls `tick` on progress.
// REQUIRES: this rank's part is filled in.
void exchange_parts(comm::Comm& data, const geometry::RankShard& rank,
                    const std::function<void()>& tick, std::span<float> vector);

// Loads the checkpoint directory `path` into the vectors of this rank, `to`,
// and returns its manifest.
// Fails on all ranks if it fails on one: there with InvalidArgument if the
// checkpoint is valid but belongs to another job (the message lists the
// differences) or step, else the reason why it does not load; elsewhere with
// Cancelled. Collective over `mesh`. Calls `tick` on progress, in the calling
// thread.
Result<pb::Manifest> load_checkpoint(FileSystem& fs, const std::string& path,
                                     int64_t step,
                                     const manifest::JobIdentity& job,
                                     comm::Mesh& mesh,
                                     const std::function<void()>& tick,
                                     const geometry::RankShard& rank,
                                     const engine::StateView& to);

}  // namespace remesh::train
