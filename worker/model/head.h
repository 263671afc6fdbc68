// Head: final norm, output projection and softmax cross-entropy of a Llama
// model. Private to this folder.
//
// The vocabulary is worked through in pieces. The forward keeps for each row
// only the running statistics of its softmax; the backward forms a piece of
// the logits' gradient and uses it up before the next. So fp32 logits never
// exist all at once. Logits in bf16 may be kept between forward and backward,
// which saves computing them twice and gives the same bits.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "parallel/geometry/param_table.h"
#include "worker/kernels/backend.h"
#include "worker/model/block.h"
#include "worker/model/pool.h"
#include "worker/model/sizes.h"

namespace remesh::model {

// What a microbatch leaves in the head for its backward. N rows.
struct HeadActivations {
  float* x = nullptr;  // (N, D)
  void* h = nullptr;   // (N, D) norm(x)
  float* rstd = nullptr;
  float* lse = nullptr;
  int32_t* targets = nullptr;
  void* logits = nullptr;  // pieces one after the other, or nullptr
};
HeadActivations make_head_activations(Pool& pool, const Sizes& sizes,
                                      kernels::Dtype d, int64_t rows,
                                      bool keep_logits);

class Head {
 public:
  // As Block. `param` is the table's index of the projection (the embedding's
  // when tied), `rows` the largest N.
  Head(const geometry::ParamTable& table, size_t param, const Sizes& sizes,
       kernels::Dtype d, int64_t rows, kernels::Backend& backend, Pool& weights,
       Pool& scratch);
  bool ok() const;
  uint64_t weight_bytes() const;
  void load(std::span<const float> master);

  // Loss of x + branch, summed over N rows; a.targets must be filled.
  double forward(int64_t N, const float* x, const float* branch,
                 const HeadActivations& a);
  // Writes dx. dh (N, D) is scratch. Overwrites a.logits.
  void backward(int64_t N, double loss_scale, const HeadActivations& a,
                float* dh, const StreamGradient& dx, std::span<float> grads);
  // fp32 logits (rows, V) of normalised rows h.
  void logits(int64_t rows, const void* h, std::span<float> out);

 private:
  struct Piece {
    int64_t col0 = 0, cols = 0;
    std::unique_ptr<kernels::Weight> weight;
  };
  // Where the piece's logits of this microbatch stand.
  void* piece_logits(const Piece& piece, int64_t N,
                     const HeadActivations& a) const;

  const geometry::ParamTable& table_;
  size_t param_, norm_param_;
  Sizes sizes_;
  kernels::Dtype d_;
  kernels::Backend& backend_;
  float* norm_ = nullptr;
  void* piece_ = nullptr;     // logits of one piece
  float* row_max_ = nullptr;  // (N) each
  float* row_sum_ = nullptr;
  float* target_logit_ = nullptr;
  std::vector<Piece> pieces_;
};

}  // namespace remesh::model
