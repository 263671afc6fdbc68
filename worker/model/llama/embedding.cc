#include "worker/model/llama/embedding.h"

#include "proto/base/check.h"

namespace remesh::model {

void Embedding::forward(const Rows& rows, const int32_t* tokens,
                        const Scratch& scratch, float* x) const {
  CHECK_MSG(table_ != nullptr, "the embedding is not loaded");
  float* y = group_.split() ? scratch.partial : x;
  backend_.embedding(table_, sizes_.vocab_begin, sizes_.vocab, tokens, rows.N,
                     sizes_.dim, y);
  group_.sum(rows, y, x);
}

void Embedding::backward(const Rows& rows, const int32_t* tokens,
                         const float* dx, const Scratch& scratch,
                         float* dtable) const {
  if (group_.split()) {
    constexpr auto kFp32 = kernels::Dtype::kFp32;
    backend_.copy(group_.own(rows, kFp32, scratch.partial), dx,
                  static_cast<size_t>(rows.n * sizes_.dim) * sizeof(float));
    group_.gather(rows, kFp32, scratch.partial);
    dx = scratch.partial;
  }
  backend_.embedding_backward(dx, tokens, sizes_.vocab_begin, sizes_.vocab,
                              rows.N, sizes_.dim, dtable);
}

}  // namespace remesh::model
