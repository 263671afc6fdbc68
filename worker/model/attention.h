// Attention of one layer between all tokens of its sequences, wherever they
// are. Private to this folder.
#pragma once

#include "worker/kernels/backend.h"
#include "worker/model/buffers.h"

namespace remesh::model {

class Attention {
 public:
  Attention(const Sizes& sizes, kernels::Dtype d, kernels::Backend& backend)
      : sizes_(sizes), d_(d), backend_(backend) {}

  // From a[kQkv] to a[kO] and a[kLse].
  void forward(const Rows& rows, const BlockParts& a, const Scratch& scratch);
  // From scratch.dattention, the gradient of a[kO], to a[kDqkv].
  void backward(const Rows& rows, const BlockParts& a, const Scratch& scratch);

 private:
  kernels::AttentionShape shape(const Rows& rows) const;

  const Sizes& sizes_;
  kernels::Dtype d_;
  kernels::Backend& backend_;
};

}  // namespace remesh::model
