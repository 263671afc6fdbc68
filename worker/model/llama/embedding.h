// Embedding: the table that turns tokens into the residual stream, split over
// the tensor-parallel ranks by vocabulary: each rank looks up its own tokens,
// leaves the others zero, and the results are summed. Private to this folder.
#pragma once

#include "worker/kernels/backend.h"
#include "worker/model/llama/buffers.h"
#include "worker/model/llama/tensor_group.h"

namespace remesh::model {

class Embedding {
 public:
  Embedding(const Sizes& sizes, kernels::Backend& backend,
            const TensorGroup& group)
      : sizes_(sizes), backend_(backend), group_(group) {}

  void load(const float* table) { table_ = table; }  // (V, D), kept
  // tokens (N) to x (n, D).
  void forward(const Rows& rows, const int32_t* tokens, const Scratch& scratch,
               float* x) const;
  // dx (n, D), added into dtable.
  void backward(const Rows& rows, const int32_t* tokens, const float* dx,
                const Scratch& scratch, float* dtable) const;

 private:
  const Sizes& sizes_;
  kernels::Backend& backend_;
  const TensorGroup& group_;
  const float* table_ = nullptr;
};

}  // namespace remesh::model
