// Small helpers for kernel tests: arrays of either type with random contents
// and comparison. Random numbers are functions of (stream, index): the same in
// every run.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "proto/base/rng.h"
#include "worker/kernels/backend.h"
#include "worker/kernels/dtype.h"

namespace remesh::kernels {

class Tensor {
 public:
  // Normal numbers of stream `stream`, or zeros when stream is 0.
  Tensor(Dtype d, int64_t n, uint64_t stream, float std = 1.0F)
      : d_(d), fp32_(static_cast<size_t>(n)), bf16_(static_cast<size_t>(n)) {
    for (int64_t i = 0; i < n; ++i)
      set(i, stream == 0
                 ? 0.0F
                 : std * random_normal(7, stream, static_cast<uint64_t>(i)));
  }
  void* data() {
    return d_ == Dtype::kFp32 ? static_cast<void*>(fp32_.data())
                              : static_cast<void*>(bf16_.data());
  }
  const void* data() const { return const_cast<Tensor*>(this)->data(); }
  float* floats() { return fp32_.data(); }  // REQUIRES: fp32
  int64_t size() const { return static_cast<int64_t>(fp32_.size()); }
  // As rows of that many elements, which difference() compares one by one; the
  // last may be shorter. Without: one row.
  Tensor by(int64_t columns) && {
    columns_ = columns;
    return std::move(*this);
  }
  int64_t columns() const { return columns_ > 0 ? columns_ : size(); }
  float operator[](int64_t i) const {
    const auto e = static_cast<size_t>(i);
    return d_ == Dtype::kFp32 ? fp32_[e] : to_float(bf16_[e]);
  }
  void set(int64_t i, float v) {
    const auto e = static_cast<size_t>(i);
    fp32_[e] = v;
    bf16_[e] = to_bf16(v);
  }

 private:
  Dtype d_;
  int64_t columns_ = 0;
  std::vector<float> fp32_;
  std::vector<Bf16> bf16_;
};

// The largest relative error of a row of b, in the L2 norm. A row of less than
// a tenth of the usual size is measured against that tenth, because what nearly
// cancels consists of rounding errors.
inline double difference(const Tensor& a, const Tensor& b) {
  constexpr double kLeastSize = 0.1;
  const int64_t columns = b.columns();
  double squares = 0;
  for (int64_t i = 0; i < b.size(); ++i)
    squares += static_cast<double>(b[i]) * b[i];
  const double usual = std::sqrt(squares * static_cast<double>(columns) /
                                 static_cast<double>(b.size()));
  double worst = 0;
  for (int64_t from = 0; from < b.size(); from += columns) {
    double error = 0;
    double size = 0;
    for (int64_t i = from; i < std::min(from + columns, b.size()); ++i) {
      const double e = static_cast<double>(a[i]) - b[i];
      error += e * e;
      size += static_cast<double>(b[i]) * b[i];
    }
    if (error == 0) continue;
    const double e =
        std::sqrt(error) / std::max(std::sqrt(size), kLeastSize * usual);
    if (!(e <= worst)) worst = e;
    if (std::isnan(worst)) return INFINITY;
  }
  return worst;
}

// Bounds of difference() from the reference, about twice what was measured.
// One rounding to the type of the result, and the order of fp32 sums.
inline double tolerance(Dtype d) { return d == Dtype::kFp32 ? 4e-6 : 2e-3; }
// Small gradients are differences of larger numbers, and on AMX the softmax and
// its gradient are rounded to bf16, too.
inline double attention_tolerance(Dtype d, const Backend& b) {
  if (d == Dtype::kFp32) return 2e-5;
  const bool amx =
      std::string_view(b.description()).find("AMX") != std::string_view::npos;
  return amx ? 1.2e-2 : 5e-3;
}

// Complete sequences of T tokens, whose q, k and v are rows of `stride`.
inline AttentionSegment whole(int64_t B, int64_t T, int64_t stride,
                              int64_t heads, int64_t kv_heads,
                              int64_t head_dim) {
  return {.B = B,
          .Tq = T,
          .Tk = T,
          .num_heads = heads,
          .num_kv_heads = kv_heads,
          .head_dim = head_dim,
          .q_stride = stride,
          .kv_stride = stride,
          .q_batch = T,
          .kv_batch = T,
          .lse_T = T};
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  for (int64_t i = 0; i < b.size(); ++i)
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i]))
      return false;
  return true;
}

}  // namespace remesh::kernels
