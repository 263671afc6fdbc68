#include "worker/engine/optimizer.h"

#include <algorithm>
#include <functional>

#include "proto/base/check.h"

namespace remesh::engine {
namespace {

using geometry::FlatRange;
using geometry::ShardParam;
using geometry::ShardTable;

// Calls f(param, begin, end) for the part of each parameter in a flat range.
void for_each_param(const ShardTable& shard, const geometry::Unit& unit,
                    FlatRange range,
                    const std::function<void(size_t, int64_t, int64_t)>& f) {
  for (size_t i = unit.first; i < unit.last; ++i) {
    const ShardParam& p = shard[i];
    const int64_t begin = std::max(range.begin, p.offset);
    const int64_t end = std::min(range.end, p.offset + p.numel());
    if (begin < end) f(i, begin, end);
  }
}

// `n` elements from `at` on.
void keep(kernels::Backend& backend, int64_t at, int64_t n,
          const ConstStateView& from, const StateView& to) {
  for (size_t v = 0; v < geometry::kNumStateVectors; ++v)
    if (from[v].data() != to[v].data())
      backend.copy(to[v].data() + at, from[v].data() + at,
                   static_cast<size_t>(n) * sizeof(float));
}

}  // namespace

double clip_coefficient(double max_norm, double norm) {
  if (max_norm <= 0) return 1;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

ParamRule OptimizerOptions::rule_of(const ShardTable& shard, size_t i) const {
  if (!rules.empty()) return rules[shard[i].param];
  return {.weight_decay = shard.spec(i).decay ? weight_decay : 0};
}

void update_unit(kernels::Backend& backend, const OptimizerOptions& options,
                 const UpdateStep& step, const geometry::RankShard& rank,
                 size_t unit, std::span<float> grads,
                 const ConstStateView& from, const StateView& to) {
  const ShardTable& shard = rank.shard;
  const FlatRange range = rank.zero.update_range(unit);
  CHECK(static_cast<int64_t>(grads.size()) == range.size());
  kernels::AdamWOptions o{.lr = step.lr,
                          .beta1 = options.beta1,
                          .beta2 = options.beta2,
                          .eps = options.eps,
                          .step = step.number,
                          .grad_scale = step.grad_scale};
  for_each_param(shard, shard.units()[unit], range,
                 [&](size_t i, int64_t begin, int64_t end) {
                   const ParamRule rule = options.rule_of(shard, i);
                   const int64_t at = begin - range.begin;
                   const int64_t s = rank.zero.state_offset(unit) + at;
                   if (rule.frozen) {
                     keep(backend, s, end - begin, from, to);
                     return;
                   }
                   o.lr = step.lr * rule.lr;
                   o.weight_decay = rule.weight_decay;
                   backend.adamw(
                       o, end - begin, grads.data() + at,
                       from.weights.data() + s, from.exp_avg.data() + s,
                       from.exp_avg_sq.data() + s, to.weights.data() + s,
                       to.exp_avg.data() + s, to.exp_avg_sq.data() + s);
                 });
}

void keep_unit(kernels::Backend& backend, const geometry::RankShard& rank,
               size_t unit, const ConstStateView& from, const StateView& to) {
  keep(backend, rank.zero.state_offset(unit),
       rank.zero.update_range(unit).size(), from, to);
}

double square_sum(kernels::Backend& backend, const OptimizerOptions& options,
                  const geometry::RankShard& rank, size_t unit,
                  std::span<const float> grads) {
  const ShardTable& shard = rank.shard;
  const int64_t first = rank.zero.update_range(unit).begin;
  double sum = 0;
  for_each_param(shard, shard.units()[unit], rank.zero.norm_range(unit),
                 [&](size_t i, int64_t begin, int64_t end) {
                   if (shard[i].owner && !options.rule_of(shard, i).frozen)
                     sum += backend.sum_of_squares(
                         end - begin, grads.data() + begin - first);
                 });
  return sum;
}

}  // namespace remesh::engine
