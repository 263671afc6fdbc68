// Sizes: the part of each layer that one rank holds, and the rows of a
// microbatch. The model is written in these sizes, never in those of
// ModelConfig. Pure.
#pragma once

#include <cstdint>
#include <span>

#include "parallel/geometry/shard_table.h"
#include "worker/kernels/backend.h"

namespace remesh::model {

struct Sizes {
  int64_t dim = 0;  // residual stream, never split
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t hidden = 0;                  // columns of gate and of up
  int64_t vocab_begin = 0, vocab = 0;  // rows of embedding and head
  double norm_eps = 0;
  bool qkv_bias = false;   // Qwen 2
  bool head_norm = false;  // of queries and keys: Qwen 3
  int tp = 1, tp_index = 0, cp = 1, cp_index = 0;

  int64_t q_dim() const { return heads * head_dim; }
  int64_t kv_dim() const { return kv_heads * head_dim; }
  int64_t qkv_dim() const { return q_dim() + 2 * kv_dim(); }
};

// vocab is 0 when the chunk has neither embedding nor head.
// REQUIRES: the chunk has at least one layer.
Sizes sizes_of(const geometry::ShardTable& shard, int chunk);

// Rows (tokens) of one microbatch on this rank.
struct Rows {
  int64_t B = 0, T = 0;  // sequences, and tokens of each on this rank
  int64_t N = 0;         // B * T
  int64_t n = 0;         // of the residual stream: ceil(N / tp)
  int64_t P = 0;         // n * tp: N and the zero rows that follow
  // Of the complete sequences, before context parallelism; empty: each sequence
  // is one.
  std::span<const kernels::Document> documents;
};

// For B sequences of T tokens before context parallelism.
Rows rows_of(const Sizes& sizes, int64_t B, int64_t T);

}  // namespace remesh::model
