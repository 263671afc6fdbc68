// Sizes: what one rank holds of each layer. The one place where shard sizes
// come from: the model is written in these, never in ModelConfig's, so that a
// tensor-parallel degree changes them here alone.
#pragma once

#include <cstdint>

#include "parallel/geometry/model_config.h"

namespace remesh::model {

struct Sizes {
  int64_t dim = 0;  // residual stream, never split
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t hidden = 0;  // columns of gate and of up
  int64_t vocab = 0;
  double norm_eps = 0;

  int64_t q_dim() const { return heads * head_dim; }
  int64_t kv_dim() const { return kv_heads * head_dim; }
  int64_t qkv_dim() const { return q_dim() + 2 * kv_dim(); }
};

inline Sizes sizes_of(const geometry::ModelConfig& c) {
  return {.dim = c.dim,
          .heads = c.n_heads,
          .kv_heads = c.n_kv_heads,
          .head_dim = c.head_dim(),
          .hidden = c.hidden_dim,
          .vocab = c.vocab_size,
          .norm_eps = c.norm_eps};
}

}  // namespace remesh::model
