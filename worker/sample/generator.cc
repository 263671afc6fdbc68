#include "worker/sample/generator.h"

#include <algorithm>
#include <cmath>

#include "proto/base/check.h"

namespace remesh::sample {

using geometry::ParamTable;

Status check_finite(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(),
                     [](float x) { return std::isfinite(x); })
             ? ok_status()
             : corrupt("the model computes values that are not finite numbers");
}

// All weights stay loaded, and there are no gradients.
class Generator::Hooks final : public model::UnitHooks {
 public:
  void need(int) override {}
  void release(int) override {}
  float* grads(int) override {
    CHECK(false);
    return nullptr;
  }
  void ready(int) override {}
};

Result<std::unique_ptr<Generator>> Generator::load(const Weights& from,
                                                   kernels::Dtype dtype,
                                                   int64_t context,
                                                   kernels::Backend& backend,
                                                   int64_t window) {
  std::unique_ptr<Generator> g(new Generator);
  g->context_ = context;
  g->window_ = window;
  g->table_ = ParamTable::make(from.model);
  ASSIGN_OR_RETURN(const geometry::StageBounds bounds,
                   geometry::stage_bounds(from.model, /*stages=*/1, context));
  ASSIGN_OR_RETURN(auto shard,
                   geometry::ShardTable::make(g->table_, {}, {}, bounds));
  g->shard_ = std::make_unique<geometry::ShardTable>(std::move(shard));
  g->pool_ = std::make_unique<model::Pool>(backend);
  g->weights_ = {g->pool_->floats(g->table_.num_elements()),
                 static_cast<size_t>(g->table_.num_elements())};
  RETURN_IF_ERROR(g->pool_->status());
  RETURN_IF_ERROR(from.load(g->table_, g->weights_));
  model::StageOptions options{
      .dtype = dtype, .max_seq = g->window_, .cache = context};
  options.recompute.assign(static_cast<size_t>(from.model.n_layers),
                           model::Recompute::kFull);  // nothing is kept
  ASSIGN_OR_RETURN(g->stage_,
                   model::Stage::create(*g->shard_, options, backend));
  const std::span<const float> weights(g->weights_);
  for (size_t u = 0; u < g->shard_->units().size(); ++u) {
    const geometry::Unit& unit = g->shard_->units()[u];
    g->stage_->load_unit(static_cast<int>(u),
                         weights.subspan(static_cast<size_t>(unit.begin),
                                         static_cast<size_t>(unit.numel())));
  }
  g->logits_.resize(static_cast<size_t>(from.model.vocab_size));
  return g;
}

std::span<const float> Generator::extend(std::span<const int32_t> tokens) {
  Hooks hooks;
  CHECK(!tokens.empty());
  for (; !tokens.empty();) {
    const size_t n = std::min(tokens.size(), static_cast<size_t>(window_));
    stage_->extend(tokens.first(n), hooks);
    tokens = tokens.subspan(n);
  }
  stage_->logits(0, 1, logits_);
  return logits_;
}

double Generator::loss(std::span<const int32_t> tokens) {
  const auto n = static_cast<int64_t>(tokens.size()) - 1;
  CHECK(n >= 1 && n <= window_);
  Hooks hooks;
  return stage_->evaluate({tokens.data(), tokens.data() + 1, /*B=*/1, n},
                          nullptr, hooks);
}

}  // namespace remesh::sample
