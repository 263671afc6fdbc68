// A checkpoint written beside training: what each costs the other.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "parallel/geometry/param_table.h"
#include "proto/base/status.h"

namespace remesh::bench {

struct BesideOptions {
  std::string dir;  // where the files go
  int threads = 2;  // that compute
  int trials = 5;
  std::string compression = "none";
};

// Medians over the trials; each trial computes alone, beside a save and beside
// a plain write, in turning order.
struct BesideResult {
  double save_s = 0;   // the shard durable, index and manifest committed
  double plain_s = 0;  // write + fsync of as many bytes, at full priority
  double plain_over_save = 0;
  double save_slows = 0;  // 0.05: computing takes 5 % longer while it saves
  double plain_slows = 0;
  int64_t copy_waits = 0;  // of all trials: updates that waited for the copy
};

// The state of one rank that holds all of `table`, in the table's order; not
// changed. Computing is matrix products in fp32 on all threads, the saves are
// train::Checkpointer's with a double-buffered state.
Result<BesideResult> measure_beside(const BesideOptions& options,
                                    const geometry::ParamTable& table,
                                    std::span<const float> weights,
                                    std::span<const float> exp_avg,
                                    std::span<const float> exp_avg_sq);

}  // namespace remesh::bench
