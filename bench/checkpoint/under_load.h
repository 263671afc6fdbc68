// Saving a checkpoint in the background: how much saving and training slow each
// other down.
#pragma once

#include <cstdint>
#include <string>

#include "parallel/geometry/param_table.h"
#include "parallel/geometry/state_vectors.h"
#include "proto/base/file_system.h"
#include "proto/base/status.h"

namespace remesh::bench {

struct UnderLoadOptions {
  std::string dir;  // of the files
  int threads = 2;  // that train
  int trials = 5;
  std::string compression = "none";
};

// Medians over the trials. Each trial trains alone, during a save and during
// a plain write; the order of the last two alternates.
struct UnderLoadResult {
  double save_s = 0;   // until the shard is durable and the manifest committed
  double plain_s = 0;  // write + fsync of the same bytes, at full priority
  double plain_over_save = 0;
  double save_slows = 0;  // 0.05: a step takes 5 % longer during a save
  double plain_slows = 0;
  int64_t copy_waits = 0;  // updates of all trials that waited for the copy
};

// Trains a model with that table with an engine::Engine, on all threads, with
// its state in shared memory; the saves are those of train::Checkpointer.
// `plain` is what a plain write writes, as much as the state.
Result<UnderLoadResult> measure_under_load(
    const UnderLoadOptions& options, const geometry::ParamTable& table,
    const geometry::ConstStateView& plain);

// Waits until everything is on the disk that has this folder.
void settle_disk(const std::string& folder);
// A plain write: the vectors one after the other in blocks of 1 MiB, and fsync.
Status write_vectors(File& file, const geometry::ConstStateView& vectors);

}  // namespace remesh::bench
