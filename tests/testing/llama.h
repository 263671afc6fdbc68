// A model of these sizes, for tests and benchmarks.
#pragma once

#include <cstdint>

#include "parallel/geometry/model_config.h"

namespace remesh::geometry {

// In the order of ModelConfig's fields.
inline ModelConfig llama(int64_t dim, int64_t n_layers, int64_t n_heads,
                         int64_t n_kv_heads, int64_t hidden_dim,
                         int64_t vocab_size, bool tied = false) {
  return {.dim = dim,
          .n_layers = n_layers,
          .n_heads = n_heads,
          .n_kv_heads = n_kv_heads,
          .hidden_dim = hidden_dim,
          .vocab_size = vocab_size,
          .tie_embeddings = tied};
}

}  // namespace remesh::geometry
