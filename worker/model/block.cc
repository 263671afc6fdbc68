#include "worker/model/block.h"

#include "proto/base/check.h"

namespace remesh::model {
namespace {

using geometry::Role;
using kernels::Dtype;

void* offset(void* p, Dtype d, int64_t elements) {
  return static_cast<char*>(p) +
         elements * static_cast<int64_t>(kernels::dtype_size(d));
}

}  // namespace

BlockActivations make_block_activations(Pool& pool, const Sizes& sizes, Dtype d,
                                        int64_t rows) {
  BlockActivations a;
  a.h1 = pool.get(rows * sizes.dim, d);
  a.rstd1 = pool.floats(rows);
  a.qkv = pool.get(rows * sizes.qkv_dim(), d);
  a.lse = pool.floats(rows * sizes.heads);
  a.o = pool.get(rows * sizes.q_dim(), d);
  a.x1 = pool.floats(rows * sizes.dim);
  a.h2 = pool.get(rows * sizes.dim, d);
  a.rstd2 = pool.floats(rows);
  a.gu = pool.get(rows * 2 * sizes.hidden, d);
  return a;
}

BlockScratch make_block_scratch(Pool& pool, const Sizes& sizes, Dtype d,
                                int64_t rows) {
  BlockScratch s;
  s.branch = pool.floats(rows * sizes.dim);
  s.s = pool.get(rows * sizes.hidden, d);
  s.ds = pool.get(rows * sizes.hidden, d);
  s.dh = pool.floats(rows * sizes.dim);
  s.dattention = pool.get(rows * sizes.q_dim(), d);
  s.dqkv = pool.get(rows * sizes.qkv_dim(), d);
  return s;
}

Block::Block(const geometry::ParamTable& table, int64_t layer,
             const Sizes& sizes, Dtype d, kernels::Backend& backend, Pool& pool)
    : table_(table),
      layer_(layer),
      sizes_(sizes),
      d_(d),
      backend_(backend),
      norm1_(pool.floats(sizes.dim)),
      norm2_(pool.floats(sizes.dim)),
      qkv_(backend.make_weight(d, sizes.qkv_dim(), sizes.dim)),
      o_(backend.make_weight(d, sizes.dim, sizes.q_dim())),
      gate_up_(backend.make_weight(d, 2 * sizes.hidden, sizes.dim)),
      down_(backend.make_weight(d, sizes.dim, sizes.hidden)) {
  // q, k, v and gate, up each run as one matrix, so they must be neighbours.
  const int64_t q = table.offset(param(Role::kQuery));
  CHECK(table.offset(param(Role::kKey)) == q + sizes.q_dim() * sizes.dim);
  CHECK(table.offset(param(Role::kValue)) ==
        q + (sizes.q_dim() + sizes.kv_dim()) * sizes.dim);
  CHECK(table.offset(param(Role::kUp)) ==
        table.offset(param(Role::kGate)) + sizes.hidden * sizes.dim);
}

bool Block::ok() const {
  return norm1_ != nullptr && norm2_ != nullptr && qkv_ != nullptr &&
         o_ != nullptr && gate_up_ != nullptr && down_ != nullptr;
}

uint64_t Block::weight_bytes() const {
  return qkv_->bytes() + o_->bytes() + gate_up_->bytes() + down_->bytes();
}

size_t Block::param(Role role) const {
  const int i = table_.find(role, layer_);
  CHECK(i >= 0);
  return static_cast<size_t>(i);
}

float* Block::grad(std::span<float> grads, Role role) const {
  return grads.data() + table_.offset(param(role));
}

void Block::load(std::span<const float> master) {
  const auto at = [&](Role role) {
    return master.data() + table_.offset(param(role));
  };
  const size_t norm_bytes = static_cast<size_t>(sizes_.dim) * sizeof(float);
  backend_.copy(norm1_, at(Role::kInputNorm), norm_bytes);
  backend_.copy(norm2_, at(Role::kPostNorm), norm_bytes);
  backend_.load_weight(*qkv_, at(Role::kQuery));
  backend_.load_weight(*o_, at(Role::kOutput));
  backend_.load_weight(*gate_up_, at(Role::kGate));
  backend_.load_weight(*down_, at(Role::kDown));
}

kernels::AttentionShape Block::attention_shape(int64_t B, int64_t T) const {
  return {.B = B,
          .T = T,
          .num_heads = sizes_.heads,
          .num_kv_heads = sizes_.kv_heads,
          .head_dim = sizes_.head_dim,
          .stride = sizes_.qkv_dim()};
}

void Block::forward(int64_t B, int64_t T, const RopeView& rope, const float* x,
                    const float* branch, const BlockActivations& a,
                    const BlockScratch& scratch, bool stop_before_down) {
  const int64_t N = B * T;
  const Sizes& s = sizes_;
  backend_.rmsnorm(d_, branch != nullptr ? x : a.x, branch, norm1_, s.norm_eps,
                   N, s.dim, a.x, a.h1, a.rstd1);
  backend_.linear(*qkv_, a.h1, N, a.qkv);
  backend_.rope(d_, a.qkv, N, T, s.heads + s.kv_heads, s.head_dim, s.qkv_dim(),
                rope.cos, rope.sin, /*inverse=*/false);
  const void* k = offset(a.qkv, d_, s.q_dim());
  const void* v = offset(a.qkv, d_, s.q_dim() + s.kv_dim());
  backend_.attention(d_, attention_shape(B, T), a.qkv, k, v, a.o, a.lse);
  backend_.linear_fp32(*o_, a.o, N, scratch.branch);
  backend_.rmsnorm(d_, a.x, scratch.branch, norm2_, s.norm_eps, N, s.dim, a.x1,
                   a.h2, a.rstd2);
  backend_.linear(*gate_up_, a.h2, N, a.gu);
  if (stop_before_down) return;
  backend_.swiglu(d_, a.gu, N, s.hidden, scratch.s);
  backend_.linear_fp32(*down_, scratch.s, N, scratch.branch);
}

void Block::backward(int64_t B, int64_t T, const RopeView& rope,
                     const BlockActivations& a, const BlockScratch& scratch,
                     const StreamGradient& dx, std::span<float> grads,
                     const std::function<void(size_t)>& on_ready) {
  const int64_t N = B * T;
  const Sizes& s = sizes_;
  const auto ready = [&](std::initializer_list<Role> roles) {
    if (on_ready)
      for (const Role r : roles) on_ready(param(r));
  };
  backend_.linear_backward_input(*down_, dx.d, N, scratch.ds);
  backend_.swiglu_backward(d_, a.gu, scratch.ds, N, s.hidden, a.gu, scratch.s);
  backend_.linear_backward_weight(d_, dx.d, scratch.s, N, s.dim, s.hidden,
                                  grad(grads, Role::kDown));
  backend_.linear_backward_weight(d_, a.gu, a.h2, N, 2 * s.hidden, s.dim,
                                  grad(grads, Role::kGate));
  ready({Role::kDown, Role::kUp, Role::kGate});
  backend_.linear_backward_input_fp32(*gate_up_, a.gu, N, false, scratch.dh);
  backend_.rmsnorm_backward(d_, scratch.dh, a.x1, a.rstd2, norm2_, dx.fp32, N,
                            s.dim, dx.fp32, dx.rounded(),
                            grad(grads, Role::kPostNorm));
  ready({Role::kPostNorm});

  backend_.linear_backward_input(*o_, dx.d, N, scratch.dattention);
  backend_.linear_backward_weight(d_, dx.d, a.o, N, s.dim, s.q_dim(),
                                  grad(grads, Role::kOutput));
  ready({Role::kOutput});
  const int64_t k0 = s.q_dim();
  const int64_t v0 = s.q_dim() + s.kv_dim();
  backend_.attention_backward(
      d_, attention_shape(B, T), a.qkv, offset(a.qkv, d_, k0),
      offset(a.qkv, d_, v0), a.o, a.lse, scratch.dattention, scratch.dqkv,
      offset(scratch.dqkv, d_, k0), offset(scratch.dqkv, d_, v0));
  backend_.rope(d_, scratch.dqkv, N, T, s.heads + s.kv_heads, s.head_dim,
                s.qkv_dim(), rope.cos, rope.sin, /*inverse=*/true);
  backend_.linear_backward_weight(d_, scratch.dqkv, a.h1, N, s.qkv_dim(), s.dim,
                                  grad(grads, Role::kQuery));
  ready({Role::kValue, Role::kKey, Role::kQuery});
  backend_.linear_backward_input_fp32(*qkv_, scratch.dqkv, N, false,
                                      scratch.dh);
  backend_.rmsnorm_backward(d_, scratch.dh, a.x, a.rstd1, norm1_, dx.fp32, N,
                            s.dim, dx.fp32, dx.rounded(),
                            grad(grads, Role::kInputNorm));
  ready({Role::kInputNorm});
}

}  // namespace remesh::model
