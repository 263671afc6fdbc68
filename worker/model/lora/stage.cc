// Low-rank adapters (LoRA, Hu et al. 2022) on the stage of any family.
//
// Each time a unit's adapters are loaded they are added to the frozen weights,
// W + s B A, and the inner stage computes with the sum. From the gradient G of
// the sum, which exists one layer at a time, come those of the adapters:
//   dA = s B^T G,  dB = s G A^T
// A rank has a part of a matrix and, in the same rows or columns, of one factor
// (geometry/lora.h); what it computes of the other factor's gradient is its
// part of a sum, as with a norm.
//
// In fp32 the inner stage reads the sums where they are, so the frozen targets
// are kept beside them. In bf16 it has copies, and they are put back at once.
#include "worker/model/stage.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "proto/base/check.h"
#include "worker/kernels/backend.h"
#include "worker/model/pool.h"

namespace remesh::model {
namespace {

using geometry::Role;
using geometry::ShardTable;
using geometry::Unit;
using geometry::UnitKind;

// A matrix with an adapter. Offsets are those in its unit.
struct Target {
  int64_t rows = 0, cols = 0;  // of the matrix, on this rank
  int64_t at = 0;              // of the matrix, in the base's unit
  int64_t a_at = 0, b_at = 0;
  std::unique_ptr<kernels::Weight> a_weight;
  float* a = nullptr;         // (rank, cols)
  float* b = nullptr;         // (rows, rank), times s
  float* original = nullptr;  // (rows, cols), the frozen values
  int64_t numel() const { return rows * cols; }
};

struct Layer {
  int unit = -1, base_unit = -1;
  float* base = nullptr;  // of its unit
  std::vector<Target> targets;
};

std::vector<Role> roles_of(const ShardTable& shard) {
  std::vector<Role> out;
  for (const geometry::ParamSpec& s : shard.table().specs())
    if (std::find(out.begin(), out.end(), s.role) == out.end())
      out.push_back(s.role);
  return out;
}

class LoraStage final : public Stage {
 public:
  LoraStage(const ShardTable& shard, const StageOptions& options,
            kernels::Backend& backend)
      : shard_(shard),
        base_(*options.base.shard),
        values_(options.base.values),
        o_(options),
        rank_(shard.table().config().lora.rank),
        scale_(shard.table().config().lora.scale()),
        backend_(backend),
        pool_(backend) {}
  Status init() {
    CHECK(static_cast<int64_t>(values_.size()) == base_.num_elements());
    for (size_t u = 0; u < shard_.units().size(); ++u) {
      const Unit& unit = shard_.units()[u];
      if (unit.chunk != o_.chunk) continue;
      layers_.emplace_back();
      RETURN_IF_ERROR(make_layer(unit, static_cast<int>(u), layers_.back()));
    }
    int64_t largest = 0, rows = 0, targets = 0;
    for (const Layer& l : layers_) {
      const Unit& unit = base_.units()[static_cast<size_t>(l.base_unit)];
      largest = std::max(largest, unit.numel());
      int64_t of_layer = 0;
      for (const Target& t : l.targets) {
        rows = std::max(rows, t.rows);
        of_layer += t.numel();
      }
      targets = std::max(targets, of_layer);
    }
    gradient_ = pool_.floats(largest);
    product_ = pool_.floats(rows * rank_);
    if (o_.dtype != Dtype::kFp32) {
      float* const shared = pool_.floats(targets);
      for (Layer& l : layers_) {
        float* at = shared;
        for (Target& t : l.targets) {
          t.original = at;
          if (at != nullptr) at += t.numel();
        }
      }
    }
    RETURN_IF_ERROR(pool_.status());
    StageOptions inner = o_;
    inner.trained = roles_of(shard_);
    inner.base = {};
    ASSIGN_OR_RETURN(inner_, Stage::create(base_, inner, backend_));
    return ok_status();
  }

  int64_t stream_rows(int64_t B, int64_t T) const override {
    return inner_->stream_rows(B, T);
  }
  void load_unit(int unit, std::span<const float> weights) override {
    load_base();
    const auto layer =
        std::find_if(layers_.begin(), layers_.end(),
                     [&](const Layer& l) { return l.unit == unit; });
    CHECK(layer != layers_.end());
    for (const Target& t : layer->targets) {
      backend_.copy(t.a, weights.data() + t.a_at, bytes(rank_ * t.cols));
      backend_.copy(t.b, weights.data() + t.b_at, bytes(rank_ * t.rows));
      backend_.scale(rank_ * t.rows, scale_, t.b);
      backend_.load_weight(*t.a_weight, t.a);
      float* const w = layer->base + t.at;
      if (o_.dtype == Dtype::kFp32)
        backend_.copy(w, t.original, bytes(t.numel()));
      else
        backend_.copy(t.original, w, bytes(t.numel()));
      backend_.linear_backward_input(*t.a_weight, t.b, t.rows, Dtype::kFp32,
                                     /*add=*/true, w);
    }
    const Unit& base = base_.units()[static_cast<size_t>(layer->base_unit)];
    inner_->load_unit(layer->base_unit,
                      {layer->base, static_cast<size_t>(base.numel())});
    if (o_.dtype == Dtype::kFp32) return;
    for (const Target& t : layer->targets)
      backend_.copy(layer->base + t.at, t.original, bytes(t.numel()));
  }

  double forward(int slot, const MicroBatch& mb, const float* x_in,
                 UnitHooks& hooks) override {
    Hooks own(*this, hooks);
    return inner_->forward(slot, mb, x_in, own);
  }
  const float* output(int slot) const override { return inner_->output(slot); }
  const float* backward(int slot, double loss_scale, const float* dy_out,
                        UnitHooks& hooks) override {
    Hooks own(*this, hooks);
    return inner_->backward(slot, loss_scale, dy_out, own);
  }
  void backward_weight(int slot, UnitHooks& hooks) override {
    Hooks own(*this, hooks);
    inner_->backward_weight(slot, own);
  }
  double evaluate(const MicroBatch& mb, const float* x_in,
                  UnitHooks& hooks) override {
    Hooks own(*this, hooks);
    return inner_->evaluate(mb, x_in, own);
  }
  const float* evaluated() const override { return inner_->evaluated(); }
  void extend(std::span<const int32_t> tokens, UnitHooks& hooks) override {
    Hooks own(*this, hooks);
    inner_->extend(tokens, own);
  }
  int64_t length() const override { return inner_->length(); }
  void truncate(int64_t length) override { inner_->truncate(length); }
  void logits(int slot, int64_t rows, std::span<float> out) override {
    inner_->logits(slot, rows, out);
  }
  Memory memory() const override {
    Memory m = inner_->memory();
    m.buffers += pool_.bytes();
    return m;
  }

 private:
  // The owner's hooks as the inner stage sees them: by units of the base.
  class Hooks final : public UnitHooks {
   public:
    Hooks(LoraStage& stage, UnitHooks& outer) : stage_(stage), outer_(outer) {
      stage_.load_base();
    }
    void need(int unit) override {
      if (const Layer* l = stage_.find(unit)) outer_.need(l->unit);
    }
    void release(int unit) override {
      if (const Layer* l = stage_.find(unit)) outer_.release(l->unit);
    }
    float* grads(int unit) override { return stage_.clear_gradient(unit); }
    void ready(int unit) override {
      const Layer* l = stage_.find(unit);
      CHECK(l != nullptr);
      stage_.add_gradients(*l, outer_.grads(l->unit));
      outer_.ready(l->unit);
    }

   private:
    LoraStage& stage_;
    UnitHooks& outer_;
  };

  Layer* find(int base_unit) {
    const auto at =
        std::find_if(layers_.begin(), layers_.end(),
                     [&](const Layer& l) { return l.base_unit == base_unit; });
    return at == layers_.end() ? nullptr : &*at;
  }

  Status make_layer(const Unit& unit, int index, Layer& layer) {
    CHECK(unit.kind == UnitKind::kBlock);
    layer.unit = index;
    layer.base_unit = base_.find_unit(UnitKind::kBlock, unit.chunk, unit.layer);
    CHECK(layer.base_unit >= 0);
    layer.base = values_.data() +
                 base_.units()[static_cast<size_t>(layer.base_unit)].begin;
    for (size_t a = unit.first; a < unit.last; a += 2) {
      layer.targets.emplace_back();
      RETURN_IF_ERROR(make_target(a, unit, layer.targets.back()));
    }
    return ok_status();
  }

  // The adapter's A is parameter `a` of the shard table, its B the next.
  Status make_target(size_t a, const Unit& unit, Target& t) {
    const geometry::ParamSpec& spec = shard_.spec(a);
    const int found = base_.find(spec.role, spec.layer);
    CHECK(found >= 0);
    const geometry::ShardParam& w = base_[static_cast<size_t>(found)];
    t = {.rows = w.rect.rows,
         .cols = w.rect.cols,
         .at = w.offset - base_.units()[static_cast<size_t>(w.unit)].begin,
         .a_at = shard_[a].offset - unit.begin,
         .b_at = shard_[a + 1].offset - unit.begin,
         .a_weight = backend_.make_weight(Dtype::kFp32, rank_, w.rect.cols),
         .a = pool_.floats(rank_ * w.rect.cols),
         .b = pool_.floats(rank_ * w.rect.rows)};
    CHECK(shard_[a].rect.cols == t.cols && shard_[a + 1].rect.rows == t.rows);
    if (o_.dtype == Dtype::kFp32) t.original = pool_.floats(t.numel());
    return t.a_weight != nullptr ? ok_status()
                                 : exhausted("no memory for adapters");
  }

  // At the first use: what has no adapters stays loaded.
  void load_base() {
    if (base_loaded_) return;
    base_loaded_ = true;
    for (size_t u = 0; u < base_.units().size(); ++u) {
      const Unit& unit = base_.units()[u];
      if (unit.chunk == o_.chunk && find(static_cast<int>(u)) == nullptr)
        inner_->load_unit(static_cast<int>(u),
                          values_.subspan(static_cast<size_t>(unit.begin),
                                          static_cast<size_t>(unit.numel())));
    }
    if (o_.dtype != Dtype::kFp32) return;
    for (const Layer& l : layers_)
      for (const Target& t : l.targets)
        backend_.copy(t.original, l.base + t.at, bytes(t.numel()));
  }

  float* clear_gradient(int base_unit) {
    const Unit& unit = base_.units()[static_cast<size_t>(base_unit)];
    CHECK(unit.kind == UnitKind::kBlock);
    backend_.zero(gradient_, bytes(unit.numel()));
    return gradient_;
  }

  // From gradient_. b has the factor s already.
  void add_gradients(const Layer& layer, float* grads) {
    for (const Target& t : layer.targets) {
      const float* const g = gradient_ + t.at;
      backend_.linear_backward_weight(Dtype::kFp32, t.b, g, t.rows, rank_,
                                      t.cols, grads + t.a_at);
      backend_.linear(*t.a_weight, g, t.rows, Dtype::kFp32, product_);
      backend_.accumulate(t.rows * rank_, scale_, product_, grads + t.b_at);
    }
  }

  static size_t bytes(int64_t floats) {
    return static_cast<size_t>(floats) * sizeof(float);
  }

  const ShardTable& shard_;  // of the adapters
  const ShardTable& base_;
  const std::span<float> values_;  // of base_
  const StageOptions o_;
  const int64_t rank_;
  const double scale_;
  kernels::Backend& backend_;
  Pool pool_;
  std::vector<Layer> layers_;
  float* gradient_ = nullptr;  // of a layer of the base
  float* product_ = nullptr;   // (rows, rank) of any target
  std::unique_ptr<Stage> inner_;
  bool base_loaded_ = false;
};

}  // namespace

Result<std::unique_ptr<Stage>> make_lora_stage(const ShardTable& shard,
                                               const StageOptions& options,
                                               kernels::Backend& backend) {
  CHECK(options.base.shard != nullptr);
  auto stage = std::make_unique<LoraStage>(shard, options, backend);
  RETURN_IF_ERROR(stage->init());
  return std::unique_ptr<Stage>(std::move(stage));
}

}  // namespace remesh::model
