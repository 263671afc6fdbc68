// Step: one optimizer update of one whole global batch, by all ranks.
//
//   forward and backward of this rank's microbatches, gradients accumulated
//   sum of gradients over the data-parallel ranks (reducer.h)
//   one small all-reduce: loss, gradient norm, and all else that ranks must
//     agree on at this boundary (agreement.h)
//   clip, AdamW, new compute weights
//
// The gradient is weighted by 1 / (tokens of the global batch) whatever the
// mesh: a rank may have more microbatches than another, or none. On one mesh
// the same inputs give the same bits; on another they differ by rounding.
//
// ZeRO stage 0: every rank updates everything. What a later stage changes is
// which elements reduce() leaves here and update() walks over.
//
// Ownership: borrows everything it is made with. Threads: one.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "parallel/comm/comm.h"
#include "parallel/geometry/param_table.h"
#include "worker/kernels/backend.h"
#include "worker/model/stage.h"
#include "worker/engine/agreement.h"
#include "worker/engine/progress.h"
#include "worker/train/reducer.h"
#include "worker/train/state.h"

namespace remesh::train {

using engine::Facts;
using engine::Progress;

struct StepOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0;
  double max_norm = 0;  // 0: no clipping
  int64_t bucket_elements = int64_t{1} << 21;
};

struct StepInput {
  double lr = 0;
  std::span<const model::MicroBatch> microbatches;  // this rank's
  int64_t global_tokens = 0;                        // of all ranks
  // Called just before the agreement: this rank's requests and save flags (the
  // sums are filled in here). May be empty.
  std::function<Facts()> facts;
};

struct StepResult {
  double loss = 0;       // mean over the global batch, nats a token
  double grad_norm = 0;  // global L2, before clipping
  Facts agreed;          // summed over all ranks
  double compute_s = 0, reduce_s = 0, update_s = 0;
};

class Step {
 public:
  // `dp`: the replicas of this rank's parameters; `world`: all ranks.
  // `shard`: of the whole model, on one pipeline and tensor rank.
  Step(const geometry::ShardTable& shard, model::Stage& stage,
       kernels::Backend& backend, comm::Comm& dp, comm::Comm& world,
       const StepOptions& options, Progress progress);

  // Makes update number state.step + 1. Afterwards state.grads holds the
  // reduced gradient, not clipped. Fails, on every rank alike and with the
  // state untouched, when loss or gradient norm is not finite. The stage must
  // hold state's weights, and does again afterwards.
  // Collective: every rank of `world` calls it.
  Result<StepResult> run(const StepInput& in, TrainState& state);

 private:
  void compute(const StepInput& in, TrainState& state, Facts& facts);
  void update(double lr, double grad_scale, TrainState& state);

  // A unit's parameters are ready, last first.
  void reduce_unit(int unit);

  const geometry::ShardTable& shard_;
  const geometry::ParamTable& table_;
  model::Stage& stage_;
  kernels::Backend& backend_;
  comm::Comm& dp_;
  comm::Comm& world_;
  const StepOptions options_;
  Progress progress_;
  GradReducer reducer_;
};

}  // namespace remesh::train
