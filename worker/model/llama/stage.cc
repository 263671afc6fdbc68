#include "worker/model/stage.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "parallel/comm/comm.h"
#include "proto/base/check.h"
#include "worker/kernels/backend.h"
#include "worker/model/llama/attention.h"
#include "worker/model/llama/block.h"
#include "worker/model/llama/buffers.h"
#include "worker/model/llama/embedding.h"
#include "worker/model/llama/head.h"
#include "worker/model/llama/tensor_group.h"
#include "worker/model/pool.h"

namespace remesh::model {
namespace {

using geometry::Role;
using geometry::ShardTable;
using geometry::Unit;
using geometry::UnitKind;

size_t bytes_of(int64_t floats) {
  return static_cast<size_t>(floats) * sizeof(float);
}

class LlamaStage final : public Stage {
 public:
  LlamaStage(const ShardTable& shard, const StageOptions& options,
             kernels::Backend& backend)
      : shard_(shard),
        backend_(backend),
        shape_(shape_of(shard, options)),
        sizes_(shape_.sizes),
        activations_(backend),
        buffers_(backend),
        b_(make_buffers(shape_, activations_, buffers_)),
        group_(sizes_, backend, options.tp),
        attention_(sizes_, shape_.dtype, backend, options.cp,
                   shard.table().config().sliding_window),
        block_(shard, shard.first_layer(options.chunk), sizes_, shape_.dtype,
               backend, group_, attention_, options.trained),
        embedding_(sizes_, backend, group_) {}

  Status init() {
    for (const Pool* pool : {&activations_, &buffers_})
      RETURN_IF_ERROR(pool->status());
    find_units();
    const RopeTables t = make_rope_tables(
        shard_.table().config(), std::max(shape_.max_seq, shape_.cache));
    backend_.copy(b_.rope_all.cos, t.cos.data(), t.cos.size() * sizeof(float));
    backend_.copy(b_.rope_all.sin, t.sin.data(), t.sin.size() * sizeof(float));
    const size_t sets =
        shape_.block_buffers == 0
            ? num_layers()
            : std::min(static_cast<size_t>(shape_.block_buffers), num_layers());
    bool complete = true;
    for (size_t i = 0; i < sets; ++i) {
      weights_.push_back(block_.make_weights());
      complete = complete && weights_.back().ok();
    }
    if (shape_.has_head) {
      head_ = std::make_unique<Head>(sizes_, shape_.dtype, backend_, group_,
                                     shape_.z_loss);
      complete = complete && head_->ok();
    }
    if (!complete) return exhausted("no memory for the stage's weights");
    return ok_status();
  }

  int64_t stream_rows(int64_t B, int64_t T) const override {
    return rows_of(sizes_, B, T).n;
  }
  void load_unit(int unit, std::span<const float> weights) override {
    const Unit& u = shard_.units()[static_cast<size_t>(unit)];
    CHECK(u.chunk == shape_.chunk);
    CHECK(static_cast<int64_t>(weights.size()) == u.numel());
    if (u.kind == UnitKind::kBlock) {
      const auto layer =
          static_cast<size_t>(u.layer - shard_.first_layer(shape_.chunk));
      block_.load(unit, weights, weights_of(layer));
      return;
    }
    const float* p = weights.data();
    if (unit == embedding_unit_) embedding_.load(p + embedding_offset_);
    if (unit == head_unit_) head_->load_norm(p + norm_offset_);
    if (unit == projection_unit_)
      head_->load_projection(p + projection_offset_);
  }

  double forward(int slot, const MicroBatch& mb, const float* x_in,
                 UnitHooks& hooks) override {
    Slot& s = slot_at(slot);
    evaluated_last_ = false;
    s.forwarded = true;
    s.backwarded = false;
    return run_forward(s, mb, x_in, hooks);
  }

  const float* output(int slot) const override {
    CHECK(slot >= 0 && slot < shape_.num_slots && !shape_.has_head);
    return b_.slots[static_cast<size_t>(slot)].output;
  }
  const float* backward(int slot, double loss_scale, const float* dy_out,
                        UnitHooks& hooks) override {
    Slot& s = slot_at(slot);
    CHECK_MSG(s.forwarded, "backward without a forward in this slot");
    s.forwarded = false;
    s.backwarded = shape_.split_backward;
    s.loss_scale = loss_scale;
    const StreamGradient dy =
        gradient(s.rows, working(s, num_layers() - 1)[kDy]);
    if (shape_.has_head) {
      head_backward(s, dy, hooks);
    } else {
      CHECK(dy_out != nullptr);
      const int64_t n = s.rows.n * sizes_.dim;
      backend_.copy(dy.fp32, dy_out, bytes_of(n));
      if (dy.rounded != nullptr)
        backend_.convert(n, Dtype::kFp32, dy.fp32, shape_.dtype, dy.rounded);
    }
    group_.gather(s.rows, shape_.dtype, dy.all);
    for (size_t i = num_layers(); i-- > 0;) block_backward(s, i, hooks);
    const float* dx = last_gradient(s).fp32;
    if (!shape_.has_embedding) return dx;
    if (!shape_.split_backward) finish_embedding(s, dx, hooks);
    return nullptr;
  }

  void backward_weight(int slot, UnitHooks& hooks) override {
    Slot& s = slot_at(slot);
    CHECK_MSG(s.backwarded, "backward_weight without backward, or not split");
    s.backwarded = false;
    if (shape_.has_head && trains_ends()) {
      const bool again = s.head.logits == nullptr;  // the only use of weights
      if (again) need_head(hooks);
      head_->backward_weight(
          s.rows, s.loss_scale, s.head, b_.scratch,
          hooks.grads(projection_unit_) + projection_offset_);
      if (again) release_head(hooks);
      finish_head(s.head.dnorm, hooks);
    }
    for (size_t i = num_layers(); i-- > 0;) {
      block_.backward_weight(s.rows, working(s, i),
                             hooks.grads(block_units_[i]));
      hooks.ready(block_units_[i]);
    }
    if (shape_.has_embedding) finish_embedding(s, s.dx, hooks);
  }

  double evaluate(const MicroBatch& mb, const float* x_in,
                  UnitHooks& hooks) override {
    evaluated_last_ = true;
    return run_forward(b_.evaluation, mb, x_in, hooks);
  }
  const float* evaluated() const override {
    CHECK(!shape_.has_head);
    return b_.evaluation.output;
  }
  void extend(std::span<const int32_t> tokens, UnitHooks& hooks) override {
    const auto n = static_cast<int64_t>(tokens.size());
    CHECK(n >= 1 && n <= shape_.max_seq && length_ + n <= shape_.cache);
    Slot& s = b_.evaluation;
    s.rows = rows_of(sizes_, /*B=*/1, n);
    embed(s, tokens.data(), hooks);
    const int64_t at = length_ * (sizes_.head_dim / 2);
    const auto [x1, branch] =
        run_layers(s, {b_.rope_all.cos + at, b_.rope_all.sin + at},
                   /*extends=*/true, hooks);
    // Of the last token alone.
    const int64_t last = (n - 1) * sizes_.dim;
    backend_.add(sizes_.dim, x1 + last, branch + last, s.head.x);
    s.rows = rows_of(sizes_, /*B=*/1, /*T=*/1);
    evaluated_last_ = true;
    length_ += n;
  }

  int64_t length() const override { return length_; }
  void truncate(int64_t length) override {
    CHECK(length >= 0 && length <= length_);
    length_ = length;
  }
  void logits(int slot, int64_t rows, std::span<float> out) override {
    CHECK(shape_.has_head);
    const Slot& s = evaluated_last_ ? b_.evaluation : slot_at(slot);
    CHECK(rows >= 1 && rows <= s.rows.N);
    head_->logits(s.rows, rows, s.head, b_.scratch, out);
  }

  Stage::Memory memory() const override {
    Memory m{.activations = activations_.bytes(), .buffers = buffers_.bytes()};
    for (const BlockWeights& w : weights_) m.weights += w.bytes();
    if (head_ != nullptr) m.weights += head_->weight_bytes();
    return m;
  }

 private:
  size_t num_layers() const { return shape_.recompute.size(); }
  void find_units() {
    const int64_t first = shard_.first_layer(shape_.chunk);
    for (size_t i = 0; i < num_layers(); ++i)
      block_units_.push_back(shard_.find_unit(UnitKind::kBlock, shape_.chunk,
                                              first + static_cast<int64_t>(i)));
    if (shape_.has_embedding)
      std::tie(embedding_unit_, embedding_offset_) = place_of(Role::kEmbedding);
    if (!shape_.has_head) return;
    const bool tied = shard_.table().config().tie_embeddings;
    std::tie(head_unit_, norm_offset_) = place_of(Role::kFinalNorm);
    std::tie(projection_unit_, projection_offset_) =
        place_of(tied ? Role::kEmbedding : Role::kHead);
  }

  // The unit that holds a parameter outside the layers, and the offset in it.
  std::pair<int, int64_t> place_of(Role role) const {
    const int i = shard_.find(role);
    CHECK(i >= 0);
    const geometry::ShardParam& p = shard_[static_cast<size_t>(i)];
    const Unit& u = shard_.units()[static_cast<size_t>(p.unit)];
    return {p.unit, p.offset - u.begin};
  }

  // The rotation of each of this rank's tokens in a sequence of T.
  void place_positions(int64_t T) {
    const int64_t cp = sizes_.cp;
    if (cp == 1 || T == positions_of_) return;
    CHECK_MSG(T % (2 * cp) == 0, "2 cp does not divide the sequence");
    positions_of_ = T;
    const int64_t half = sizes_.head_dim / 2;
    const int64_t piece = T / (2 * cp) * half;
    const int64_t from[2] = {sizes_.cp_index, 2 * cp - 1 - sizes_.cp_index};
    for (const int i : {0, 1}) {
      backend_.copy(b_.rope.cos + i * piece, b_.rope_all.cos + from[i] * piece,
                    bytes_of(piece));
      backend_.copy(b_.rope.sin + i * piece, b_.rope_all.sin + from[i] * piece,
                    bytes_of(piece));
    }
  }

  Slot& slot_at(int slot) {
    CHECK(slot >= 0 && slot < shape_.num_slots);
    return b_.slots[static_cast<size_t>(slot)];
  }
  BlockWeights& weights_of(size_t layer) {
    return weights_[layer % weights_.size()];
  }
  const BlockWeights& loaded(size_t layer) {
    const BlockWeights& w = weights_of(layer);
    CHECK_MSG(w.unit == block_units_[layer],
              "the unit's weights are not loaded");
    return w;
  }
  BlockParts working(const Slot& s, size_t layer) const {
    return overlay(s.blocks[layer], b_.shared);
  }
  // The gradient of the stream whose gathered form is at `all`.
  StreamGradient gradient(const Rows& rows, void* all) const {
    void* own = group_.own(rows, shape_.dtype, all);
    if (shape_.dtype == Dtype::kFp32)
      return {.fp32 = static_cast<float*>(own), .all = all};
    return {.fp32 = b_.dx, .all = all, .rounded = own};
  }

  // Fills the slot's first x from tokens or x_in, and its targets.
  void enter(Slot& s, const MicroBatch& mb, const float* x_in,
             UnitHooks& hooks) {
    CHECK(mb.B >= 1 && mb.B <= shape_.max_batch && mb.T >= 1 &&
          mb.T <= shape_.max_seq);
    s.documents = documents_of(mb);
    s.rows = rows_of(sizes_, mb.B, mb.T);
    s.rows.documents = s.documents;
    place_positions(mb.T);
    if (shape_.has_embedding) {
      CHECK(mb.tokens_BT != nullptr);
      embed(s, mb.tokens_BT, hooks);
    } else {
      CHECK(x_in != nullptr);
      backend_.copy(s.blocks.front().f(kX), x_in,
                    bytes_of(s.rows.n * sizes_.dim));
    }
    if (shape_.has_head) {
      CHECK(mb.targets_BT != nullptr);
      backend_.copy(s.head.targets, mb.targets_BT,
                    static_cast<size_t>(s.rows.N) * sizeof(int32_t));
    }
  }

  void embed(const Slot& s, const int32_t* tokens, UnitHooks& hooks) {
    backend_.copy(s.tokens, tokens,
                  static_cast<size_t>(s.rows.N) * sizeof(int32_t));
    hooks.need(embedding_unit_);
    embedding_.forward(s.rows, s.tokens, b_.scratch, s.blocks.front().f(kX));
    hooks.release(embedding_unit_);
  }

  // The residual stream after the layers is x1 + branch.
  struct Stream {
    const float* x1 = nullptr;
    const float* branch = nullptr;
  };
  // extends: the rows continue the sequence whose keys and values are kept.
  Stream run_layers(const Slot& s, const RopeView& rope, bool extends,
                    UnitHooks& hooks) {
    Stream out;
    for (size_t i = 0; i < num_layers(); ++i) {
      const BlockParts a = working(s, i);
      attention_.continue_from(extends ? KeyCache{b_.cache[i], length_}
                                       : KeyCache{});
      hooks.need(block_units_[i]);
      out.branch = block_.forward(loaded(i), s.rows, rope, out.x1, out.branch,
                                  a, b_.scratch);
      hooks.release(block_units_[i]);
      out.x1 = a.f(kX1);
    }
    return out;
  }

  double run_forward(Slot& s, const MicroBatch& mb, const float* x_in,
                     UnitHooks& hooks) {
    enter(s, mb, x_in, hooks);
    const auto [x1, branch] = run_layers(s, b_.rope, /*extends=*/false, hooks);
    if (!shape_.has_head) {
      backend_.add(s.rows.n * sizes_.dim, x1, branch, s.output);
      return 0;
    }
    need_head(hooks);
    const double loss = head_->forward(s.rows, x1, branch, s.head, b_.scratch);
    release_head(hooks);
    return loss;
  }

  void need_head(UnitHooks& hooks) {
    hooks.need(head_unit_);
    if (projection_unit_ != head_unit_) hooks.need(projection_unit_);
  }
  void release_head(UnitHooks& hooks) {
    hooks.release(head_unit_);
    if (projection_unit_ != head_unit_) hooks.release(projection_unit_);
  }
  // Receives the gradient of the stage's input.
  StreamGradient last_gradient(const Slot& s) const {
    if (s.dx != nullptr) return {.fp32 = s.dx};
    if (b_.dx != nullptr) return {.fp32 = b_.dx};
    return {.fp32 = gradient(s.rows, b_.shared[kDy]).fp32};
  }
  void head_backward(Slot& s, const StreamGradient& dy, UnitHooks& hooks) {
    need_head(hooks);
    const bool now = !shape_.split_backward && trains_ends();
    float* dnorm = shape_.split_backward ? s.head.dnorm : b_.shared.f(kDnorm1);
    float* dw =
        now ? hooks.grads(projection_unit_) + projection_offset_ : nullptr;
    head_->backward(s.rows, s.loss_scale, s.head, b_.scratch, dy, dnorm, dw);
    release_head(hooks);
    if (now) finish_head(dnorm, hooks);
  }

  void finish_head(const float* dnorm, UnitHooks& hooks) {
    backend_.accumulate(sizes_.dim, 1, dnorm,
                        hooks.grads(head_unit_) + norm_offset_);
    hooks.ready(head_unit_);
  }
  void block_backward(Slot& s, size_t layer, UnitHooks& hooks) {
    const int unit = block_units_[layer];
    const BlockParts a = working(s, layer);
    const StreamGradient dy = gradient(s.rows, a[kDy]);
    const StreamGradient dx =
        layer == 0 ? last_gradient(s)
                   : gradient(s.rows, working(s, layer - 1)[kDy]);
    hooks.need(unit);
    const BlockWeights& w = loaded(layer);
    block_.recompute(shape_.recompute[layer], w, s.rows, b_.rope, a,
                     b_.scratch);
    block_.backward(w, s.rows, b_.rope, a, b_.scratch, dy,
                    gradient(s.rows, a[kDmid]), dx,
                    shape_.split_backward ? nullptr : hooks.grads(unit));
    hooks.release(unit);
    if (!shape_.split_backward) hooks.ready(unit);
  }

  void finish_embedding(const Slot& s, const float* dx, UnitHooks& hooks) {
    if (!trains_ends()) return;
    embedding_.backward(s.rows, s.tokens, dx, b_.scratch,
                        hooks.grads(embedding_unit_) + embedding_offset_);
    hooks.ready(embedding_unit_);
  }

  // Whether embedding, final norm and head are trained.
  bool trains_ends() const { return shape_.trained.empty(); }

  const ShardTable& shard_;
  kernels::Backend& backend_;
  const StageShape shape_;
  const Sizes& sizes_;
  Pool activations_, buffers_;
  StageBuffers b_;
  TensorGroup group_;
  Attention attention_;
  Block block_;
  Embedding embedding_;
  std::vector<BlockWeights> weights_;
  std::unique_ptr<Head> head_;
  std::vector<int> block_units_;
  int embedding_unit_ = -1, head_unit_ = -1;
  int projection_unit_ = -1;  // the head's matrix: its own or the embedding's
  int64_t embedding_offset_ = 0, norm_offset_ = 0, projection_offset_ = 0;
  int64_t positions_of_ = 0;     // length whose positions b_.rope has
  bool evaluated_last_ = false;  // whose logits logits() gives
  int64_t length_ = 0;           // of the sequence that extend() continues
};

}  // namespace

Result<std::unique_ptr<Stage>> make_llama_stage(const ShardTable& shard,
                                                const StageOptions& options,
                                                kernels::Backend& backend) {
  auto stage = std::make_unique<LlamaStage>(shard, options, backend);
  RETURN_IF_ERROR(stage->init());
  return std::unique_ptr<Stage>(std::move(stage));
}

}  // namespace remesh::model
