// Block: one transformer layer of a Llama model, forward and backward, on
// buffers it is given. Private to this folder.
//
// The layer reads x (N, D) and computes
//   x1 = x + Wo attention(rope(Wqkv norm(x)))
//   x2 = x1 + Wdown swiglu(Wgate_up norm(x1))
// but leaves the last sum to whoever normalises it next (rmsnorm with a
// residual), which saves a pass over memory.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "parallel/geometry/param_table.h"
#include "worker/kernels/backend.h"
#include "worker/model/pool.h"
#include "worker/model/sizes.h"

namespace remesh::model {

// What a microbatch leaves in one layer for its backward. N rows.
struct BlockActivations {
  float* x = nullptr;  // (N, D)
  void* h1 = nullptr;  // (N, D) norm(x)
  float* rstd1 = nullptr;
  void* qkv = nullptr;  // (N, q + 2 kv), q and k rotated
  float* lse = nullptr;
  void* o = nullptr;    // (N, q)
  float* x1 = nullptr;  // (N, D)
  void* h2 = nullptr;   // (N, D) norm(x1)
  float* rstd2 = nullptr;
  void* gu = nullptr;  // (N, 2 F)
};
// Everything but x, which the stage places.
BlockActivations make_block_activations(Pool& pool, const Sizes& sizes,
                                        kernels::Dtype d, int64_t rows);

// Buffers that live only inside one call; all layers share them.
struct BlockScratch {
  float* branch = nullptr;     // (N, D) a branch before its residual
  void* s = nullptr;           // (N, F)
  void* ds = nullptr;          // (N, F)
  float* dh = nullptr;         // (N, D) gradient of a norm's output
  void* dattention = nullptr;  // (N, q) gradient of o
  void* dqkv = nullptr;        // (N, q + 2 kv)
};
BlockScratch make_block_scratch(Pool& pool, const Sizes& sizes,
                                kernels::Dtype d, int64_t rows);

// Gradient of the residual stream, (N, D): in fp32, and the same in the type
// of the products (one buffer when that is fp32).
struct StreamGradient {
  float* fp32 = nullptr;
  void* d = nullptr;
  // Where a kernel has to write the second form, or nullptr.
  void* rounded() const { return d == fp32 ? nullptr : d; }
};

struct RopeView {
  const float* cos = nullptr;
  const float* sin = nullptr;
};

class Block {
 public:
  // `table` must outlive the block. Weights come from the backend; norms from
  // `pool`. Check ok() afterwards: false when memory was short.
  Block(const geometry::ParamTable& table, int64_t layer, const Sizes& sizes,
        kernels::Dtype d, kernels::Backend& backend, Pool& pool);
  bool ok() const;
  uint64_t weight_bytes() const;
  void load(std::span<const float> master);

  // Input: x + branch (written to a.x) when branch is given, else a.x.
  // Leaves x1 in a.x1 and, unless `stop_before_down`, the second branch in
  // scratch.branch.
  void forward(int64_t B, int64_t T, const RopeView& rope, const float* x,
               const float* branch, const BlockActivations& a,
               const BlockScratch& scratch, bool stop_before_down);

  // dx: gradient of the layer's output, replaced by that of its input.
  // Overwrites a.gu.
  void backward(int64_t B, int64_t T, const RopeView& rope,
                const BlockActivations& a, const BlockScratch& scratch,
                const StreamGradient& dx, std::span<float> grads,
                const std::function<void(size_t)>& on_ready);

 private:
  size_t param(geometry::Role role) const;
  float* grad(std::span<float> grads, geometry::Role role) const;
  kernels::AttentionShape attention_shape(int64_t B, int64_t T) const;

  const geometry::ParamTable& table_;
  int64_t layer_;
  Sizes sizes_;
  kernels::Dtype d_;
  kernels::Backend& backend_;
  float* norm1_ = nullptr;
  float* norm2_ = nullptr;
  std::unique_ptr<kernels::Weight> qkv_, o_, gate_up_, down_;
};

}  // namespace remesh::model
