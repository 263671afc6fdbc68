// Agreement: what every rank must know to decide the same at a step boundary.
//
// Each rank contributes Facts; one small all-reduce of doubles a step sums
// them. The sum is the same on every rank, and so is every decision made from
// it: clip factor, stop, begin of a save, its commit. Counting ranks by adding
// ones is exact in double.
#pragma once

#include <array>
#include <cstdint>

namespace remesh::engine {

struct Facts {
  double loss_sum = 0;    // nats, over this rank's tokens
  double tokens = 0;      // that loss_sum covers
  double square_sum = 0;  // of the gradient; the engine fills in the sum
  // One when true on this rank; after the reduction, how many ranks.
  double stop = 0;          // asked to stop at this boundary
  double must_stop = 0;     // ... even if saving fails
  double stop_saves = 0;    // asked to save a checkpoint at that stop
  double shard_saved = 0;   // this rank's part of the save under way is done
  double shard_failed = 0;  // ... or has failed
  double committed = 0;     // rank 0: the save under way counts now
  double gave_up = 0;       // rank 0: ... or was removed
  // Rank 0's number of the newest asked-for checkpoint; other ranks 0.
  double checkpoint_request = 0;
  // What this rank's matrix products reach at best, operations a second; 0 when
  // not measured.
  double gemm_flops_per_s = 0;

  static constexpr int kSize = 12;
  std::array<double, kSize> to_array() const;
  static Facts from_array(const std::array<double, kSize>& a);
};

}  // namespace remesh::engine
