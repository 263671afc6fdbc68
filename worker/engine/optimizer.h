// The update of a rank's state: AdamW on its update ranges.
#pragma once

#include <cstdint>
#include <span>

#include "parallel/geometry/zero.h"
#include "worker/engine/state_store.h"
#include "worker/kernels/backend.h"

namespace remesh::engine {

struct OptimizerOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0;  // of parameters that have it (ParamSpec::decay)
  double max_norm = 0;      // 0: no clipping
};

// The factor for gradients of global L2 norm `norm`: min(1, max_norm / (norm +
// 1e-6)), as in torch.nn.utils.clip_grad_norm_; 1 when max_norm is 0.
double clip_coefficient(double max_norm, double norm);

// Makes update number `step` of this rank's part of unit `unit`: reads state
// `from` and writes `to`, which is the same memory or does not overlap it.
// `grads`: the gradient of the update range, to be multiplied by grad_scale.
void update_unit(kernels::Backend& backend, const OptimizerOptions& options,
                 double lr, double grad_scale, int64_t step,
                 const geometry::ShardTable& shard,
                 const geometry::ZeroPlan& zero, size_t unit,
                 std::span<float> grads, const ConstStateView& from,
                 const StateView& to);

// Sum of squares over the part of the unit's gradient that this rank counts
// (ZeroPlan::norm_range, owned parameters).
double square_sum(kernels::Backend& backend, const geometry::ShardTable& shard,
                  const geometry::ZeroPlan& zero, size_t unit,
                  std::span<const float> grads);

}  // namespace remesh::engine
