// Small helpers for kernel tests: arrays of either type with random contents
// and comparison. Random numbers are functions of (stream, index): the same in
// every run.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "proto/base/rng.h"
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
  std::vector<float> fp32_;
  std::vector<Bf16> bf16_;
};

// Largest |a - b| over the largest |b|.
inline double difference(const Tensor& a, const Tensor& b) {
  double worst = 0;
  double top = 1e-30;
  for (int64_t i = 0; i < b.size(); ++i) {
    const double e = std::abs(static_cast<double>(a[i]) - b[i]);
    worst = std::isnan(e) ? INFINITY : std::max(worst, e);
    top = std::max(top, std::abs(static_cast<double>(b[i])));
  }
  return worst / top;
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  for (int64_t i = 0; i < b.size(); ++i)
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i]))
      return false;
  return true;
}

}  // namespace remesh::kernels
