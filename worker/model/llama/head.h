// Head: final norm, output projection and softmax cross-entropy of a Llama
// model. Private to this folder.
//
// The vocabulary is split over the tensor-parallel ranks, and each rank's part
// is processed in pieces. The forward keeps for each row only the running
// statistics of its softmax, which the ranks combine; the backward forms a
// piece of the logits' gradient and uses it up before the next. So fp32 logits
// never exist all at once. Logits in bf16 may be kept between forward and
// backward, which saves computing them twice and gives the same bits.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "worker/kernels/backend.h"
#include "worker/model/llama/block.h"
#include "worker/model/llama/buffers.h"
#include "worker/model/llama/tensor_group.h"

namespace remesh::model {

class Head {
 public:
  // All must outlive the head. ok() is false afterwards when memory was short.
  Head(const Sizes& sizes, kernels::Dtype d, kernels::Backend& backend,
       const TensorGroup& group, double z_loss);
  bool ok() const;
  uint64_t weight_bytes() const;
  void load_norm(const float* norm) { norm_ = norm; }
  void load_projection(const float* weights);  // (V, D)

  // Loss of x + branch, summed over N rows; a.targets must be filled.
  double forward(const Rows& rows, const float* x, const float* branch,
                 const HeadParts& a, const Scratch& scratch) const;
  // Writes dx, not gathered, and the gradient of the norm's weight. dw: the
  // projection's, added to; nullptr leaves it to backward_weight(). Overwrites
  // a.logits.
  void backward(const Rows& rows, double loss_scale, const HeadParts& a,
                const Scratch& scratch, const StreamGradient& dx, float* dnorm,
                float* dw) const;
  void backward_weight(const Rows& rows, double loss_scale, const HeadParts& a,
                       const Scratch& scratch, float* dw) const;
  // fp32 logits (num_rows, V) of the first rows. Overwrites a.h and a.rstd with
  // what forward wrote there.
  void logits(const Rows& rows, int64_t num_rows, const HeadParts& a,
              const Scratch& scratch, std::span<float> out) const;

 private:
  struct Piece {
    int64_t col0 = 0, cols = 0;  // of this rank's part of the vocabulary
    std::unique_ptr<kernels::Weight> weight;
  };
  // The memory of the piece's logits of this microbatch.
  void* piece_logits(const Piece& piece, const Rows& rows, const HeadParts& a,
                     const Scratch& scratch) const;
  // The gradient of a piece of the logits, recomputed unless kept.
  void* piece_gradient(const Piece& piece, const Rows& rows, double loss_scale,
                       const HeadParts& a, const Scratch& scratch) const;

  const Sizes& sizes_;
  kernels::Dtype d_;
  kernels::Backend& backend_;
  const TensorGroup& group_;
  double z_loss_;
  const float* norm_ = nullptr;
  std::vector<Piece> pieces_;
};

}  // namespace remesh::model
