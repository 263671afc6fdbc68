// The Llama family: Llama 2 and 3, Mistral, and Qwen 2 and 3, which add to it
// biases of queries, keys and values (Qwen 2), or norms of each head of queries
// and keys (Qwen 3).
//
// Query and key rows are in half-split rotary order, as in Hugging Face's
// checkpoints.
#pragma once

#include <vector>

#include "parallel/geometry/family.h"

namespace remesh::geometry {

// Order: embedding; for each layer input norm, q, k, v, their biases, the norms
// of heads, o, post-attention norm, gate, up, down; final norm; head unless
// tied. By config.arch.
std::vector<ParamSpec> llama_parameters(const ModelConfig& config);

// Sizes are this rank's: D dimension, q and kv query and key/value dimensions,
// F hidden dimension, V vocabulary; N rows (tokens) of a microbatch, of which
// the residual stream has n = ceil(N / tp), gathered P = n tp; d bytes of an
// operand of a GEMM (4 or 2).
//
// weights      in bf16 d bytes an element, twice that when packed, with the
//              sides of each matrix rounded up to 32: each layer (or each of
//              block_buffers) (q + 2 kv, D), (D, q), (2 F, D), (D, F); the head
//              (V, D)
// activations
//   each layer none       8 n D + 8 n + 2 d P D + d N (2 q + 2 kv + 2 F)
//                         + 4 N heads
//              selective  the same without d N (q + 2 F) + 4 N heads
//              full       4 n D
//              norms of heads: and d N (q + kv) + 4 N heads, with those of
//                         keys, unless full
//      split backward     none (also for selective): and
//                         d N (F + q + 2 kv) + 2 d P D + 8 D
//                         norms of heads: and 8 head_dim
//                         full: 4 n D + 4 d P D + d N (2 q + 2 kv + 3 F) + 8 D
//   first stage           4 N; split: and 4 n D
//   last stage            4 n D + d P D + 4 n + 8 N; in bf16, unless the last
//                         layer is recomputed, and d N V; split: and 4 D
//   other stages          4 n D
// buffers      one layer's worth of what lives inside a pass or is kept by no
//              microbatch, evaluation sharing that memory; rotary tables; with
//              context parallelism three gradients and two copies of keys and
//              values, and fp32 queries
//
// The backend's own workspaces come on top: predict_workspace() of the planner.
ChunkMemory llama_memory(const ShardTable& shard, int chunk,
                         const ChunkUse& use);

}  // namespace remesh::geometry
