// Block: one transformer layer of a Llama model, forward and backward, on
// buffers and weights it is given. All layers of a rank have the same sizes, so
// one Block serves them all. Private to this folder.
//
// The layer reads x (n, D) and computes
//   x1 = x + sum of Wo attention(rope(Wqkv gather(norm(x))))
//   x2 = x1 + sum of Wdown swiglu(Wgate_up gather(norm(x1)))
// where gather and sum are over the tensor-parallel ranks (tensor_group.h).
// Qwen 2 adds a bias after Wqkv, Qwen 3 norms the heads of q and k before rope.
// The last sum of x1 and branch is left to the rmsnorm that follows (it takes a
// residual), which saves a pass over memory.
#pragma once

#include <array>
#include <memory>
#include <span>

#include "worker/kernels/backend.h"
#include "worker/model/llama/attention.h"
#include "worker/model/llama/buffers.h"
#include "worker/model/llama/tensor_group.h"

namespace remesh::model {

// The weights of one layer, ready to compute with.
struct BlockWeights {
  std::unique_ptr<kernels::Weight> qkv, o, gate_up, down;
  const float* norm1 = nullptr;  // (D) each, in the caller's memory
  const float* norm2 = nullptr;
  const float* bias = nullptr;   // (q + 2 kv), or none
  const float* heads = nullptr;  // (2, head_dim) norms of q and k, or none
  int unit = -1;                 // loaded; -1: none

  bool ok() const {
    return qkv != nullptr && o != nullptr && gate_up != nullptr &&
           down != nullptr;
  }
  uint64_t bytes() const {
    return qkv->bytes() + o->bytes() + gate_up->bytes() + down->bytes();
  }
};

// Gradient of the residual stream at one point of the model.
struct StreamGradient {
  float* fp32 = nullptr;  // (n, D)
  // (P, D) in the type of the GEMMs, of which n rows are this rank's own;
  // nullptr when no GEMM needs it. In fp32 the own rows are `fp32`.
  void* all = nullptr;
  // Where a kernel writes the own rows in the other type, or nullptr.
  void* rounded = nullptr;
};

class Block {
 public:
  // All must outlive the block. `layer`: any layer of the chunk. `trained`:
  // StageOptions::trained.
  Block(const geometry::ShardTable& shard, int64_t layer, const Sizes& sizes,
        kernels::Dtype d, kernels::Backend& backend, const TensorGroup& group,
        Attention& attention, const std::vector<geometry::Role>& trained);

  BlockWeights make_weights() const;
  // From one unit's elements.
  void load(int unit, std::span<const float> weights, BlockWeights& w) const;

  // Input: x + branch (written to a[kX]) when branch is given, else a[kX].
  // Leaves x1 in a[kX1] and returns the second branch (n, D), which is in
  // scratch.
  const float* forward(const BlockWeights& w, const Rows& rows,
                       const RopeView& rope, const float* x,
                       const float* branch, const BlockParts& a,
                       const Scratch& scratch) const;
  // Recomputes what a layer with this setting did not keep.
  void recompute(Recompute kind, const BlockWeights& w, const Rows& rows,
                 const RopeView& rope, const BlockParts& a,
                 const Scratch& scratch) const;

  // dy: gradient of the layer's output, gathered; dmid: receives that of x1;
  // dx: receives that of the layer's input, gathered where there is room. The
  // three may be the same. grads: the unit's, added to; if nullptr, what
  // backward_weight() needs is left in `a`. Overwrites a[kGu].
  void backward(const BlockWeights& w, const Rows& rows, const RopeView& rope,
                const BlockParts& a, const Scratch& scratch,
                const StreamGradient& dy, const StreamGradient& dmid,
                const StreamGradient& dx, float* grads) const;
  void backward_weight(const Rows& rows, const BlockParts& a,
                       float* grads) const;

 private:
  // Where a layer's parameters begin in its unit.
  struct Offsets {
    int64_t norm1 = 0, qkv = 0, o = 0, norm2 = 0, gate_up = 0, down = 0;
    int64_t bias = 0, heads = 0;
  };

  void forward_attention(const BlockWeights& w, const Rows& rows,
                         const RopeView& rope, const float* x,
                         const float* branch, const BlockParts& a,
                         const Scratch& scratch) const;
  // Up to gate and up.
  void forward_half(const BlockWeights& w, const Rows& rows,
                    const BlockParts& a, const Scratch& scratch) const;
  // The heads of q and of k with their norms.
  struct HeadGroup {
    kernels::HeadRows rows;
    int64_t column = 0;  // the first, in q, k
    int64_t rstd = 0;    // the first
    int64_t weight = 0;
  };
  std::array<HeadGroup, 2> head_groups(const Rows& rows) const;
  void norm_heads(const BlockWeights& w, const Rows& rows,
                  const BlockParts& a) const;
  void norm_heads_backward(const BlockWeights& w, const Rows& rows,
                           const BlockParts& a) const;
  void add_norm_gradient(const float* dnorm, float* to) const;
  void add_head_gradients(const BlockParts& a, float* grads) const;
  void down_weight(const Rows& rows, const BlockParts& a, float* grads) const;
  void gate_up_weight(const Rows& rows, const BlockParts& a,
                      float* grads) const;
  void o_weight(const Rows& rows, const BlockParts& a, float* grads) const;
  void qkv_weight(const Rows& rows, const BlockParts& a, float* grads) const;
  void norm_backward(const Rows& rows, const float* dh, const float* x,
                     const float* rstd, const float* weight,
                     const StreamGradient& from, const StreamGradient& to,
                     float* dnorm) const;

  const Sizes& sizes_;
  kernels::Dtype d_;
  kernels::Backend& backend_;
  const TensorGroup& group_;
  Attention& attention_;
  Offsets at_;
  // Whose gradients are wanted. `other`: norms and biases.
  struct {
    bool qkv = true, o = true, gate_up = true, down = true, other = true;
  } trains_;
};

}  // namespace remesh::model
