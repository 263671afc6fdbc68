#include "worker/model/head.h"

#include <algorithm>

#include "proto/base/check.h"

namespace remesh::model {
namespace {
using kernels::Dtype;

// Vocabulary entries a piece: large enough that a product runs at full rate,
// small enough that a piece of logits stays in the last cache.
constexpr int64_t kPieceColumns = 4096;
}  // namespace

HeadActivations make_head_activations(Pool& pool, const Sizes& sizes, Dtype d,
                                      int64_t rows, bool keep_logits) {
  HeadActivations a;
  a.x = pool.floats(rows * sizes.dim);
  a.h = pool.get(rows * sizes.dim, d);
  a.rstd = pool.floats(rows);
  a.lse = pool.floats(rows);
  a.targets = pool.ints(rows);
  if (keep_logits) a.logits = pool.get(rows * sizes.vocab, d);
  return a;
}

Head::Head(const geometry::ParamTable& table, size_t param, const Sizes& sizes,
           Dtype d, int64_t rows, kernels::Backend& backend, Pool& weights,
           Pool& scratch)
    : table_(table),
      param_(param),
      norm_param_(static_cast<size_t>(table.find(geometry::Role::kFinalNorm))),
      sizes_(sizes),
      d_(d),
      backend_(backend),
      norm_(weights.floats(sizes.dim)),
      piece_(scratch.get(rows * std::min(kPieceColumns, sizes.vocab), d)),
      row_max_(scratch.floats(rows)),
      row_sum_(scratch.floats(rows)),
      target_logit_(scratch.floats(rows)) {
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

void Head::load(std::span<const float> master) {
  backend_.copy(norm_, master.data() + table_.offset(norm_param_),
                static_cast<size_t>(sizes_.dim) * sizeof(float));
  const float* w = master.data() + table_.offset(param_);
  for (Piece& p : pieces_)
    backend_.load_weight(*p.weight, w + p.col0 * sizes_.dim);
}

void* Head::piece_logits(const Piece& piece, int64_t N,
                         const HeadActivations& a) const {
  if (a.logits == nullptr) return piece_;
  return static_cast<char*>(a.logits) +
         N * piece.col0 * static_cast<int64_t>(kernels::dtype_size(d_));
}

double Head::forward(int64_t N, const float* x, const float* branch,
                     const HeadActivations& a) {
  backend_.rmsnorm(d_, x, branch, norm_, sizes_.norm_eps, N, sizes_.dim, a.x,
                   a.h, a.rstd);
  for (const Piece& p : pieces_) {
    void* logits = piece_logits(p, N, a);
    backend_.linear(*p.weight, a.h, N, logits);
    backend_.cross_entropy_add(d_, logits, N, p.cols, p.col0, a.targets,
                               p.col0 == 0, row_max_, row_sum_, target_logit_);
  }
  return backend_.cross_entropy_finish(N, row_max_, row_sum_, target_logit_,
                                       a.lse);
}

void Head::backward(int64_t N, double loss_scale, const HeadActivations& a,
                    float* dh, const StreamGradient& dx,
                    std::span<float> grads) {
  float* dw = grads.data() + table_.offset(param_);
  for (const Piece& p : pieces_) {
    void* logits = piece_logits(p, N, a);
    if (a.logits == nullptr) backend_.linear(*p.weight, a.h, N, logits);
    backend_.cross_entropy_backward(d_, logits, N, p.cols, p.col0, a.targets,
                                    a.lse, loss_scale, logits);
    backend_.linear_backward_input_fp32(*p.weight, logits, N, p.col0 > 0, dh);
    backend_.linear_backward_weight(d_, logits, a.h, N, p.cols, sizes_.dim,
                                    dw + p.col0 * sizes_.dim);
  }
  backend_.rmsnorm_backward(d_, dh, a.x, a.rstd, norm_, nullptr, N, sizes_.dim,
                            dx.fp32, dx.rounded(),
                            grads.data() + table_.offset(norm_param_));
}

void Head::logits(int64_t rows, const void* h, std::span<float> out) {
  CHECK(static_cast<int64_t>(out.size()) == rows * sizes_.vocab);
  std::vector<float> piece;
  for (const Piece& p : pieces_) {
    backend_.linear(*p.weight, h, rows, piece_);
    piece.resize(static_cast<size_t>(rows * p.cols));
    backend_.convert(rows * p.cols, d_, piece_, Dtype::kFp32, piece.data());
    for (int64_t i = 0; i < rows; ++i)
      std::copy_n(piece.data() + i * p.cols, p.cols,
                  out.data() + i * sizes_.vocab + p.col0);
  }
}

}  // namespace remesh::model
