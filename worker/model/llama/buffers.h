// Buffers: all memory of a stage except its weights, and what shares it.
// Private to this folder.
//
//   slot     what one microbatch keeps between its passes
//   shared   the same parts of one layer, for layers that do not keep them:
//            recomputation, and evaluate()
//   scratch  what lives within one call
//
// llama_memory() (parallel/geometry/llama.h) has the same sizes as formulas.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "worker/kernels/backend.h"
#include "worker/model/llama/rope.h"
#include "worker/model/llama/sizes.h"
#include "worker/model/pool.h"
#include "worker/model/stage.h"

namespace remesh::model {

// What a microbatch leaves in one layer. Rows N, n, P as in sizes.h; d is the
// type of the GEMMs, the rest is fp32.
enum Part : int {
  kX,       // (n, D) the layer's input
  kH1,      // (P, D) d: norm(x)
  kRstd1,   // (n)
  kQkv,     // (N, q + 2 kv) d, q and k rotated
  kQk,      // (N, q + kv) d: q and k before the norms of heads (Qwen 3)
  kRstdQk,  // (N, heads), then (N, kv_heads)
  kLse,     // (B, heads, T)
  kO,       // (N, q) d: attention's output
  kX1,      // (n, D)
  kH2,      // (P, D) d: norm(x1)
  kRstd2,   // (n)
  kGu,      // (N, 2 F) d: gate and up; after backward their gradients
  // Kept for weight gradients that are computed later.
  kS,        // (N, F) d: swiglu(gu)
  kDy,       // (P, D) d: gradient of the layer's output
  kDmid,     // (P, D) d: gradient of x1
  kDqkv,     // (N, q + 2 kv) d
  kDnorm1,   // (D) gradients of the norms' weights
  kDnorm2,   // (D)
  kDqkNorm,  // (2, head_dim) of the norms of heads of q and k
  kNumParts,
};

// Parts of one layer; nullptr for parts held elsewhere.
struct BlockParts {
  std::array<void*, kNumParts> at{};
  void* operator[](Part p) const { return at[p]; }
  float* f(Part p) const { return static_cast<float*>(at[p]); }
};
// `own` where it has a part, else `shared`.
BlockParts overlay(const BlockParts& own, const BlockParts& shared);

// What a microbatch leaves in the head.
struct HeadParts {
  float* x = nullptr;  // (n, D)
  void* h = nullptr;   // (P, D) d: norm(x)
  float* rstd = nullptr;
  float* lse = nullptr;        // (N)
  int32_t* targets = nullptr;  // (N)
  // (N, V) d, piece after piece; after backward their gradients. nullptr when
  // they are recomputed.
  void* logits = nullptr;
  float* dnorm = nullptr;  // (D)
};

struct Slot {
  std::vector<kernels::Document> documents;
  Rows rows;  // refers to them
  bool forwarded = false, backwarded = false;
  double loss_scale = 0;
  std::vector<BlockParts> blocks;
  HeadParts head;             // last stage
  float* output = nullptr;    // other stages, (n, D)
  int32_t* tokens = nullptr;  // first stage, (N)
  float* dx = nullptr;        // first stage, split backward: (n, D)
};

// Alive within one call.
struct Scratch {
  float* partial = nullptr;    // (P, D) a GEMM into the residual stream
  float* mine = nullptr;       // (n, D) its sum over the tensor-parallel ranks
  void* ds = nullptr;          // (N, F) d
  void* dattention = nullptr;  // (N, q) d
  void* piece = nullptr;       // (N, head piece) d: logits
  float* row_max = nullptr;    // (N)
  float* new_max = nullptr;    // (N) tensor parallelism
  float* row_sums = nullptr;   // (2 N): sums, then the targets' logits
  // (N, q) context parallelism, cache: fp32 out, or dq
  float* attention = nullptr;
  void* kv[2] = {};    // (N, 2 kv) d: keys and values in transit
  float* dkv[3] = {};  // (2, N, kv) their gradients
};

struct StageBuffers {
  std::vector<Slot> slots;
  Slot evaluation;
  BlockParts shared;
  Scratch scratch;
  float* dx = nullptr;  // (n, D) gradient of the residual stream; nullptr: it
                        // runs through kDy and kDmid themselves
  RopeView rope_all;    // (max T, head_dim / 2)
  RopeView rope;        // of this rank's positions
  // By layer: (cache, 2 kv) d, keys and values of earlier tokens.
  std::vector<void*> cache;
};

// Everything that determines sizes.
struct StageShape : StageOptions {  // recompute: one per layer
  Sizes sizes;
  Rows max;
  bool has_embedding = false, has_head = false;
  int64_t num_layers() const { return static_cast<int64_t>(recompute.size()); }
};
StageShape shape_of(const geometry::ShardTable& shard,
                    const StageOptions& options);

// Vocabulary entries in a piece of the head: large enough for a GEMM to run at
// full rate, small enough for a piece of logits to stay in the last-level
// cache.
inline constexpr int64_t kPieceColumns = 4096;

// `slots` gets what grows with the number of microbatches in flight.
StageBuffers make_buffers(const StageShape& shape, Pool& slots, Pool& buffers);

}  // namespace remesh::model
