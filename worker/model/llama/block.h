// Block: one transformer layer of a Llama model, forward and backward, on
// buffers and weights it is given. All layers of a rank have the same sizes, so
// one Block serves them all. Private to this folder.
//
// The layer reads x (n, D) and computes
//   x1 = x + sum of Wo attention(rope(Wqkv gather(norm(x))))
//   x2 = x1 + sum of Wdown swiglu(Wgate_up gather(norm(x1)))
// where gather and sum go over the tensor-parallel ranks (tensor_group.h), but
// leaves the last sum of x1 and branch to whoever normalises it next (rmsnorm
// with a residual), which saves a pass over memory.
#pragma once

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
  const float* norm1 = nullptr;  // (D) each, where the caller has them
  const float* norm2 = nullptr;
  int unit = -1;  // loaded; -1: none

  bool ok() const;
  uint64_t bytes() const;
};

// Gradient of the residual stream at some place of the model.
struct StreamGradient {
  float* fp32 = nullptr;  // (n, D)
  // (P, D) in the type of the products, of which n rows are this rank's own;
  // nullptr: no product needs it. In fp32 the own rows are `fp32`.
  void* all = nullptr;
  // Where a kernel has to write the own rows in the other type, or nullptr.
  void* rounded = nullptr;
};

class Block {
 public:
  // All must outlive the block. `layer`: any of the chunk's.
  Block(const geometry::ShardTable& shard, int64_t layer, const Sizes& sizes,
        kernels::Dtype d, kernels::Backend& backend, const TensorGroup& group,
        Attention& attention);

  BlockWeights make_weights() const;
  // From one unit's elements.
  void load(int unit, std::span<const float> weights, BlockWeights& w) const;

  // Input: x + branch (written to a[kX]) when branch is given, else a[kX].
  // Leaves x1 in a[kX1] and returns the second branch (n, D), which lies in
  // scratch.
  const float* forward(const BlockWeights& w, const Rows& rows,
                       const RopeView& rope, const float* x,
                       const float* branch, const BlockParts& a,
                       const Scratch& scratch) const;
  // Computes again what a layer treated so did not keep.
  void recompute(Recompute kind, const BlockWeights& w, const Rows& rows,
                 const RopeView& rope, const BlockParts& a,
                 const Scratch& scratch) const;

  // dy: gradient of the layer's output, gathered; dmid: where that of x1 goes;
  // dx: where that of the layer's input goes, gathered where there is room. The
  // three may be the same. grads: the unit's, added to; nullptr: leaves in `a`
  // what backward_weight() needs. Overwrites a[kGu].
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
  };

  void forward_attention(const BlockWeights& w, const Rows& rows,
                         const RopeView& rope, const float* x,
                         const float* branch, const BlockParts& a,
                         const Scratch& scratch) const;
  // Up to gate and up.
  void forward_half(const BlockWeights& w, const Rows& rows,
                    const BlockParts& a, const Scratch& scratch) const;
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
};

}  // namespace remesh::model
