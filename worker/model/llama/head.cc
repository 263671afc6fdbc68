#include "worker/model/llama/head.h"

#include <algorithm>
#include <optional>

#include "proto/base/check.h"

namespace remesh::model {

using kernels::Dtype;

Head::Head(const Sizes& sizes, Dtype d, kernels::Backend& backend,
           const TensorGroup& group, double z_loss)
    : sizes_(sizes), d_(d), backend_(backend), group_(group), z_loss_(z_loss) {
  for (int64_t c = 0; c < sizes.vocab; c += kPieceColumns) {
    const int64_t cols = std::min(kPieceColumns, sizes.vocab - c);
    pieces_.push_back({c, cols, backend.make_weight(d, cols, sizes.dim)});
  }
}

bool Head::ok() const {
  return std::all_of(pieces_.begin(), pieces_.end(),
                     [](const Piece& p) { return p.weight != nullptr; });
}

uint64_t Head::weight_bytes() const {
  uint64_t bytes = 0;
  for (const Piece& p : pieces_) bytes += p.weight->bytes();
  return bytes;
}

void Head::load_projection(const float* weights) {
  for (Piece& p : pieces_)
    backend_.load_weight(*p.weight, weights + p.col0 * sizes_.dim);
}

void* Head::piece_logits(const Piece& piece, const Rows& rows,
                         const HeadParts& a, const Scratch& scratch) const {
  if (a.logits == nullptr) return scratch.piece;
  return kernels::element(a.logits, d_, rows.N * piece.col0);
}

double Head::forward(const Rows& rows, const float* x, const float* branch,
                     const HeadParts& a, const Scratch& scratch) const {
  const int64_t N = rows.N;
  backend_.rmsnorm(d_, x, branch, norm_, sizes_.norm_eps, rows.n, sizes_.dim,
                   a.x, group_.own(rows, d_, a.h), a.rstd);
  group_.gather(rows, d_, a.h);
  float* row_sum = scratch.row_sums;
  float* target_logit = scratch.row_sums + N;
  for (const Piece& p : pieces_) {
    void* logits = piece_logits(p, rows, a, scratch);
    backend_.linear(*p.weight, a.h, N, d_, logits);
    backend_.cross_entropy_add(
        d_, logits, N, p.cols, sizes_.vocab_begin + p.col0, a.targets,
        p.col0 == 0, scratch.row_max, row_sum, target_logit);
  }
  if (group_.split()) {
    backend_.copy(scratch.new_max, scratch.row_max,
                  static_cast<size_t>(N) * sizeof(float));
    group_.all_reduce(N, scratch.new_max, comm::Op::kMax);
    backend_.cross_entropy_rescale(N, scratch.new_max, scratch.row_max,
                                   row_sum);
    group_.all_reduce(2 * N, scratch.row_sums, comm::Op::kSum);
  }
  return backend_.cross_entropy_finish(N, a.targets, scratch.row_max, row_sum,
                                       target_logit, a.lse);
}

void* Head::piece_gradient(const Piece& p, const Rows& rows, double loss_scale,
                           const HeadParts& a, const Scratch& scratch) const {
  void* logits = piece_logits(p, rows, a, scratch);
  if (a.logits == nullptr) backend_.linear(*p.weight, a.h, rows.N, d_, logits);
  backend_.cross_entropy_backward(d_, logits, rows.N, p.cols,
                                  sizes_.vocab_begin + p.col0, a.targets, a.lse,
                                  loss_scale, z_loss_, logits);
  return logits;
}

void Head::backward(const Rows& rows, double loss_scale, const HeadParts& a,
                    const Scratch& scratch, const StreamGradient& dx,
                    float* dnorm, float* dw) const {
  std::optional<TensorGroup::Sum> dh;
  for (const Piece& p : pieces_) {
    const void* dlogits = piece_gradient(p, rows, loss_scale, a, scratch);
    backend_.linear_backward_input(*p.weight, dlogits, rows.N, Dtype::kFp32,
                                   p.col0 > 0, scratch.partial);
    if (&p == &pieces_.back())
      dh = group_.start_sum(rows, scratch.partial, scratch.mine);
    if (dw != nullptr)
      backend_.linear_backward_weight(d_, dlogits, a.h, rows.N, p.cols,
                                      sizes_.dim, dw + p.col0 * sizes_.dim);
  }
  backend_.zero(dnorm, static_cast<size_t>(sizes_.dim) * sizeof(float));
  backend_.rmsnorm_backward(d_, dh->wait(), a.x, a.rstd, norm_, nullptr, rows.n,
                            sizes_.dim, dx.fp32, dx.rounded, dnorm);
}

void Head::backward_weight(const Rows& rows, double loss_scale,
                           const HeadParts& a, const Scratch& scratch,
                           float* dw) const {
  for (const Piece& p : pieces_) {
    const void* dlogits = a.logits != nullptr
                              ? piece_logits(p, rows, a, scratch)
                              : piece_gradient(p, rows, loss_scale, a, scratch);
    backend_.linear_backward_weight(d_, dlogits, a.h, rows.N, p.cols,
                                    sizes_.dim, dw + p.col0 * sizes_.dim);
  }
}

void Head::logits(const Rows& rows, int64_t num_rows, const HeadParts& a,
                  const Scratch& scratch, std::span<float> out) const {
  CHECK(static_cast<int64_t>(out.size()) == num_rows * sizes_.vocab);
  backend_.rmsnorm(d_, a.x, nullptr, norm_, sizes_.norm_eps, rows.n, sizes_.dim,
                   nullptr, group_.own(rows, d_, a.h), a.rstd);
  group_.gather(rows, d_, a.h);
  for (const Piece& p : pieces_) {
    backend_.linear(*p.weight, a.h, num_rows, d_, scratch.piece);
    backend_.convert_rows(num_rows, p.cols, d_, scratch.piece, p.cols,
                          Dtype::kFp32, out.data() + p.col0, sizes_.vocab);
  }
}

}  // namespace remesh::model
