// Agreement: what every rank must know to decide alike at a step boundary.
//
// Each rank contributes StepVotes, and one small all-reduce of doubles a step
// sums them. The sum is the same on every rank, and so are the decisions that
// follow from it: clip factor, stop, start and commit of a save. Counting ranks
// by adding ones is exact in double.
#pragma once

namespace remesh::engine {

struct StepVotes {
  double loss_sum = 0;    // nats, over this rank's tokens
  double tokens = 0;      // of this rank's microbatches
  double targets = 0;     // of these, the ones that loss_sum covers
  double square_sum = 0;  // of the gradient; the engine fills it in
  // One when true on this rank; after the reduction, the number of ranks.
  double stop = 0;          // asked to stop at this boundary
  double must_stop = 0;     // ... even if saving fails
  double stop_saves = 0;    // asked to save a checkpoint at that stop
  double shard_saved = 0;   // this rank has written its part of the save
  double shard_failed = 0;  // ... or failed to
  double committed = 0;     // rank 0: the save in progress is committed
  double gave_up = 0;       // rank 0: ... or was removed
  // Number of the newest checkpoint requested from rank 0; other ranks 0.
  double checkpoint_request = 0;
  // The best measured GEMM rate of this rank, in FLOP/s; 0 when not measured.
  double gemm_flops_per_s = 0;
};
// Its numbers, all of which are summed.
inline constexpr int kNumVotes = sizeof(StepVotes) / sizeof(double);

}  // namespace remesh::engine
