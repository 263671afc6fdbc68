#include "worker/model/attention.h"

namespace remesh::model {
namespace {

using kernels::Dtype;

void* offset(void* p, Dtype d, int64_t elements) {
  return static_cast<char*>(p) +
         elements * static_cast<int64_t>(kernels::dtype_size(d));
}

}  // namespace

kernels::AttentionShape Attention::shape(const Rows& rows) const {
  return {.B = rows.B,
          .T = rows.T,
          .num_heads = sizes_.heads,
          .num_kv_heads = sizes_.kv_heads,
          .head_dim = sizes_.head_dim,
          .stride = sizes_.qkv_dim()};
}

void Attention::forward(const Rows& rows, const BlockParts& a,
                        const Scratch& /*scratch*/) {
  const int64_t k0 = sizes_.q_dim();
  const int64_t v0 = k0 + sizes_.kv_dim();
  backend_.attention(d_, shape(rows), a[kQkv], offset(a[kQkv], d_, k0),
                     offset(a[kQkv], d_, v0), a[kO], a.f(kLse));
}

void Attention::backward(const Rows& rows, const BlockParts& a,
                         const Scratch& scratch) {
  const int64_t k0 = sizes_.q_dim();
  const int64_t v0 = k0 + sizes_.kv_dim();
  backend_.attention_backward(
      d_, shape(rows), a[kQkv], offset(a[kQkv], d_, k0),
      offset(a[kQkv], d_, v0), a[kO], a.f(kLse), scratch.dattention, a[kDqkv],
      offset(a[kDqkv], d_, k0), offset(a[kDqkv], d_, v0));
}

}  // namespace remesh::model
