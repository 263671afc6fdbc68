// The update of a rank's state: AdamW on its update ranges.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/geometry/sharding.h"
#include "worker/engine/state_store.h"
#include "worker/kernels/backend.h"

namespace remesh::engine {

// How a parameter is updated.
struct ParamRule {
  double lr = 1;  // times the learning rate
  double weight_decay = 0;
  bool frozen = false;  // not at all, and its gradient does not count
};

struct OptimizerOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0;  // of parameters that have it (ParamSpec::decay)
  double max_norm = 0;      // 0: no clipping
  // By parameter of the ParamTable; empty: each as ParamSpec::decay says.
  std::vector<ParamRule> rules;

  ParamRule rule_of(const geometry::ShardTable& shard, size_t i) const;
};

// The factor for gradients of global L2 norm `norm`: min(1, max_norm / (norm +
// 1e-6)), as in torch.nn.utils.clip_grad_norm_; 1 when max_norm is 0.
double clip_coefficient(double max_norm, double norm);

struct UpdateStep {
  int64_t number = 1;
  double lr = 0;
  double grad_scale = 1;  // what gradients are multiplied by
};

// Updates this rank's part of unit `unit`: reads the state `from`, writes `to`,
// which is the same memory or does not overlap it. `grads`: of its update
// range.
void update_unit(kernels::Backend& backend, const OptimizerOptions& options,
                 const UpdateStep& step, const geometry::RankShard& rank,
                 size_t unit, std::span<float> grads,
                 const ConstStateView& from, const StateView& to);

// Copies this rank's part of the unit's state, unless it stays where it is.
void keep_unit(kernels::Backend& backend, const geometry::RankShard& rank,
               size_t unit, const ConstStateView& from, const StateView& to);

// Sum of squares over the part of the unit's gradient that this rank counts
// (ZeroPlan::norm_range, owned parameters that are not frozen).
double square_sum(kernels::Backend& backend, const OptimizerOptions& options,
                  const geometry::RankShard& rank, size_t unit,
                  std::span<const float> grads);

}  // namespace remesh::engine
