#include "worker/model/llama/block.h"

#include <algorithm>

#include "proto/base/check.h"

namespace remesh::model {

using geometry::Role;
using geometry::ShardTable;
using kernels::element;

Block::Block(const ShardTable& shard, int64_t layer, const Sizes& sizes,
             kernels::Dtype d, kernels::Backend& backend,
             const TensorGroup& group, Attention& attention,
             const std::vector<Role>& trained)
    : sizes_(sizes),
      d_(d),
      backend_(backend),
      group_(group),
      attention_(attention) {
  const auto at = [&](Role role) {
    const int i = shard.find(role, layer);
    CHECK(i >= 0);
    const geometry::ShardParam& p = shard[static_cast<size_t>(i)];
    return p.offset - shard.units()[static_cast<size_t>(p.unit)].begin;
  };
  at_ = {.norm1 = at(Role::kInputNorm),
         .qkv = at(Role::kQuery),
         .o = at(Role::kOutput),
         .norm2 = at(Role::kPostNorm),
         .gate_up = at(Role::kGate),
         .down = at(Role::kDown)};
  // q, k, v and gate, up each run as one matrix, so they must be neighbours.
  CHECK(at(Role::kKey) == at_.qkv + sizes.q_dim() * sizes.dim);
  CHECK(at(Role::kValue) ==
        at_.qkv + (sizes.q_dim() + sizes.kv_dim()) * sizes.dim);
  CHECK(at(Role::kUp) == at_.gate_up + sizes.hidden * sizes.dim);
  if (sizes.qkv_bias) {
    at_.bias = at(Role::kQueryBias);
    CHECK(at(Role::kKeyBias) == at_.bias + sizes.q_dim());
    CHECK(at(Role::kValueBias) == at_.bias + sizes.q_dim() + sizes.kv_dim());
  }
  if (sizes.head_norm) {
    at_.heads = at(Role::kQueryNorm);
    CHECK(at(Role::kKeyNorm) == at_.heads + sizes.head_dim);
  }
  if (trained.empty()) return;
  const auto any = [&](std::initializer_list<Role> roles) {
    return std::find_first_of(trained.begin(), trained.end(), roles.begin(),
                              roles.end()) != trained.end();
  };
  trains_ = {.qkv = any({Role::kQuery, Role::kKey, Role::kValue}),
             .o = any({Role::kOutput}),
             .gate_up = any({Role::kGate, Role::kUp}),
             .down = any({Role::kDown}),
             .other = false};
}

BlockWeights Block::make_weights() const {
  const Sizes& s = sizes_;
  return {.qkv = backend_.make_weight(d_, s.qkv_dim(), s.dim),
          .o = backend_.make_weight(d_, s.dim, s.q_dim()),
          .gate_up = backend_.make_weight(d_, 2 * s.hidden, s.dim),
          .down = backend_.make_weight(d_, s.dim, s.hidden)};
}

void Block::load(int unit, std::span<const float> weights,
                 BlockWeights& w) const {
  const float* p = weights.data();
  w.norm1 = p + at_.norm1;
  w.norm2 = p + at_.norm2;
  if (sizes_.qkv_bias) w.bias = p + at_.bias;
  if (sizes_.head_norm) w.heads = p + at_.heads;
  backend_.load_weight(*w.qkv, p + at_.qkv);
  backend_.load_weight(*w.o, p + at_.o);
  backend_.load_weight(*w.gate_up, p + at_.gate_up);
  backend_.load_weight(*w.down, p + at_.down);
  w.unit = unit;
}

std::array<Block::HeadGroup, 2> Block::head_groups(const Rows& rows) const {
  const Sizes& s = sizes_;
  kernels::HeadRows heads{.rows = rows.N,
                          .num_heads = s.heads,
                          .head_dim = s.head_dim,
                          .x_stride = s.q_dim() + s.kv_dim(),
                          .y_stride = s.qkv_dim()};
  const HeadGroup q{.rows = heads};
  heads.num_heads = s.kv_heads;
  return {q, HeadGroup{.rows = heads,
                       .column = s.q_dim(),
                       .rstd = rows.N * s.heads,
                       .weight = s.head_dim}};
}

void Block::norm_heads(const BlockWeights& w, const Rows& rows,
                       const BlockParts& a) const {
  const int64_t columns = sizes_.q_dim() + sizes_.kv_dim();
  backend_.convert_rows(rows.N, columns, d_, a[kQkv], sizes_.qkv_dim(), d_,
                        a[kQk], columns);
  for (const HeadGroup& g : head_groups(rows))
    backend_.head_rmsnorm(
        d_, g.rows, element(a[kQk], d_, g.column), w.heads + g.weight,
        sizes_.norm_eps, element(a[kQkv], d_, g.column), a.f(kRstdQk) + g.rstd);
}

// Turns the gradient of what norm_heads() wrote into that of what it read.
void Block::norm_heads_backward(const BlockWeights& w, const Rows& rows,
                                const BlockParts& a) const {
  float* const dnorm = a.f(kDqkNorm);
  backend_.zero(dnorm,
                2 * static_cast<size_t>(sizes_.head_dim) * sizeof(float));
  for (const HeadGroup& g : head_groups(rows))
    backend_.head_rmsnorm_backward(
        d_, g.rows, element(a[kQk], d_, g.column), a.f(kRstdQk) + g.rstd,
        w.heads + g.weight, element(a[kDqkv], d_, g.column), dnorm + g.weight);
}

void Block::add_norm_gradient(const float* dnorm, float* to) const {
  if (trains_.other) backend_.accumulate(sizes_.dim, 1, dnorm, to);
}

void Block::add_head_gradients(const BlockParts& a, float* grads) const {
  if (sizes_.head_norm && trains_.other)
    backend_.accumulate(2 * sizes_.head_dim, 1, a.f(kDqkNorm),
                        grads + at_.heads);
}

void Block::forward_attention(const BlockWeights& w, const Rows& rows,
                              const RopeView& rope, const float* x,
                              const float* branch, const BlockParts& a,
                              const Scratch& scratch) const {
  const Sizes& s = sizes_;
  backend_.rmsnorm(d_, branch != nullptr ? x : a.f(kX), branch, w.norm1,
                   s.norm_eps, rows.n, s.dim, a.f(kX),
                   group_.own(rows, d_, a[kH1]), a.f(kRstd1));
  group_.gather(rows, d_, a[kH1]);
  backend_.linear(*w.qkv, a[kH1], rows.N, d_, a[kQkv]);
  if (s.qkv_bias) backend_.add_bias(d_, w.bias, rows.N, s.qkv_dim(), a[kQkv]);
  if (s.head_norm) norm_heads(w, rows, a);
  backend_.rope(d_, a[kQkv], rows.N, rows.T, s.heads + s.kv_heads, s.head_dim,
                s.qkv_dim(), rope.cos, rope.sin, /*inverse=*/false);
  attention_.forward(rows, a, scratch);
}

void Block::forward_half(const BlockWeights& w, const Rows& rows,
                         const BlockParts& a, const Scratch& scratch) const {
  const Sizes& s = sizes_;
  backend_.linear(*w.o, a[kO], rows.N, Dtype::kFp32, scratch.partial);
  const float* branch = group_.sum(rows, scratch.partial, scratch.mine);
  backend_.rmsnorm(d_, a.f(kX), branch, w.norm2, s.norm_eps, rows.n, s.dim,
                   a.f(kX1), group_.own(rows, d_, a[kH2]), a.f(kRstd2));
  group_.gather(rows, d_, a[kH2]);
  backend_.linear(*w.gate_up, a[kH2], rows.N, d_, a[kGu]);
}

const float* Block::forward(const BlockWeights& w, const Rows& rows,
                            const RopeView& rope, const float* x,
                            const float* branch, const BlockParts& a,
                            const Scratch& scratch) const {
  forward_attention(w, rows, rope, x, branch, a, scratch);
  forward_half(w, rows, a, scratch);
  backend_.swiglu(d_, a[kGu], rows.N, sizes_.hidden, a[kS]);
  backend_.linear(*w.down, a[kS], rows.N, Dtype::kFp32, scratch.partial);
  return group_.sum(rows, scratch.partial, scratch.mine);
}

void Block::recompute(Recompute kind, const BlockWeights& w, const Rows& rows,
                      const RopeView& rope, const BlockParts& a,
                      const Scratch& scratch) const {
  switch (kind) {
    case Recompute::kNone:
      return;
    case Recompute::kSelective:
      attention_.forward(rows, a, scratch);
      backend_.linear(*w.gate_up, a[kH2], rows.N, d_, a[kGu]);
      return;
    case Recompute::kFull:
      forward_attention(w, rows, rope, nullptr, nullptr, a, scratch);
      forward_half(w, rows, a, scratch);
      return;
  }
}

void Block::norm_backward(const Rows& rows, const float* dh, const float* x,
                          const float* rstd, const float* weight,
                          const StreamGradient& from, const StreamGradient& to,
                          float* dnorm) const {
  backend_.zero(dnorm, static_cast<size_t>(sizes_.dim) * sizeof(float));
  backend_.rmsnorm_backward(d_, dh, x, rstd, weight, from.fp32, rows.n,
                            sizes_.dim, to.fp32, to.rounded, dnorm);
}

void Block::down_weight(const Rows& rows, const BlockParts& a,
                        float* grads) const {
  if (!trains_.down) return;
  backend_.linear_backward_weight(d_, a[kDy], a[kS], rows.N, sizes_.dim,
                                  sizes_.hidden, grads + at_.down);
}

void Block::gate_up_weight(const Rows& rows, const BlockParts& a,
                           float* grads) const {
  if (!trains_.gate_up) return;
  backend_.linear_backward_weight(d_, a[kGu], a[kH2], rows.N, 2 * sizes_.hidden,
                                  sizes_.dim, grads + at_.gate_up);
}

void Block::o_weight(const Rows& rows, const BlockParts& a,
                     float* grads) const {
  if (!trains_.o) return;
  backend_.linear_backward_weight(d_, a[kDmid], a[kO], rows.N, sizes_.dim,
                                  sizes_.q_dim(), grads + at_.o);
}

void Block::qkv_weight(const Rows& rows, const BlockParts& a,
                       float* grads) const {
  if (trains_.qkv)
    backend_.linear_backward_weight(d_, a[kDqkv], a[kH1], rows.N,
                                    sizes_.qkv_dim(), sizes_.dim,
                                    grads + at_.qkv);
  if (sizes_.qkv_bias && trains_.other)
    backend_.bias_backward(d_, a[kDqkv], rows.N, sizes_.qkv_dim(),
                           grads + at_.bias);
}

// Communication overlaps with the weight gradients, except those of GEMMs with
// dy and dmid, whose memory may receive the next gradient.
void Block::backward(const BlockWeights& w, const Rows& rows,
                     const RopeView& rope, const BlockParts& a,
                     const Scratch& scratch, const StreamGradient& dy,
                     const StreamGradient& dmid, const StreamGradient& dx,
                     float* grads) const {
  const Sizes& s = sizes_;
  backend_.linear_backward_input(*w.down, dy.all, rows.N, d_, false,
                                 scratch.ds);
  backend_.swiglu_backward(d_, a[kGu], scratch.ds, rows.N, s.hidden, a[kGu],
                           a[kS]);
  backend_.linear_backward_input(*w.gate_up, a[kGu], rows.N, Dtype::kFp32,
                                 false, scratch.partial);
  auto dh = group_.start_sum(rows, scratch.partial, scratch.mine);
  if (grads != nullptr) down_weight(rows, a, grads);
  norm_backward(rows, dh.wait(), a.f(kX1), a.f(kRstd2), w.norm2, dy, dmid,
                a.f(kDnorm2));
  auto gathered = group_.start_gather(rows, d_, dmid.all);
  if (grads != nullptr) {
    gate_up_weight(rows, a, grads);
    add_norm_gradient(a.f(kDnorm2), grads + at_.norm2);
  }
  if (gathered != nullptr) gathered->wait();

  backend_.linear_backward_input(*w.o, dmid.all, rows.N, d_, false,
                                 scratch.dattention);
  attention_.backward(rows, a, scratch);
  backend_.rope(d_, a[kDqkv], rows.N, rows.T, s.heads + s.kv_heads, s.head_dim,
                s.qkv_dim(), rope.cos, rope.sin, /*inverse=*/true);
  if (s.head_norm) norm_heads_backward(w, rows, a);
  backend_.linear_backward_input(*w.qkv, a[kDqkv], rows.N, Dtype::kFp32, false,
                                 scratch.partial);
  dh = group_.start_sum(rows, scratch.partial, scratch.mine);
  if (grads != nullptr) o_weight(rows, a, grads);
  norm_backward(rows, dh.wait(), a.f(kX), a.f(kRstd1), w.norm1, dmid, dx,
                a.f(kDnorm1));
  gathered = group_.start_gather(rows, d_, dx.all);
  if (grads != nullptr) {
    qkv_weight(rows, a, grads);
    add_norm_gradient(a.f(kDnorm1), grads + at_.norm1);
    add_head_gradients(a, grads);
  }
  if (gathered != nullptr) gathered->wait();
}

void Block::backward_weight(const Rows& rows, const BlockParts& a,
                            float* grads) const {
  down_weight(rows, a, grads);
  gate_up_weight(rows, a, grads);
  add_norm_gradient(a.f(kDnorm2), grads + at_.norm2);
  o_weight(rows, a, grads);
  qkv_weight(rows, a, grads);
  add_norm_gradient(a.f(kDnorm1), grads + at_.norm1);
  add_head_gradients(a, grads);
}

}  // namespace remesh::model
