// Saving a checkpoint in the background: how much saving and computing slow
// each other down.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "parallel/geometry/param_table.h"
#include "proto/base/status.h"

namespace remesh::bench {

struct UnderLoadOptions {
  std::string dir;  // of the files
  int threads = 2;  // that compute
  int trials = 5;
  std::string compression = "none";
};

// Medians over the trials. Each trial computes alone, during a save and during
// a plain write; the order of the last two alternates.
struct UnderLoadResult {
  double save_s = 0;   // until the shard is durable and the manifest committed
  double plain_s = 0;  // write + fsync of the same bytes, at full priority
  double plain_over_save = 0;
  double save_slows = 0;  // 0.05: computing takes 5 % longer during a save
  double plain_slows = 0;
  int64_t copy_waits = 0;  // updates of all trials that waited for the copy
};

// The spans are the unsharded state of `table`, in the table's order, and are
// only read. Computing means fp32 GEMMs on all threads; the saves are those of
// train::Checkpointer with a double-buffered state.
Result<UnderLoadResult> measure_under_load(const UnderLoadOptions& options,
                                           const geometry::ParamTable& table,
                                           std::span<const float> weights,
                                           std::span<const float> exp_avg,
                                           std::span<const float> exp_avg_sq);

}  // namespace remesh::bench
