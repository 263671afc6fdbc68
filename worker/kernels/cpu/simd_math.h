// Elements and small functions that vectorised files share, each with its own
// copy in an unnamed namespace (simd_body.h says why). Not a public header.
#pragma once

#include <cstdint>

#include "worker/kernels/cpu/simd.h"

#define REMESH_INLINE static inline __attribute__((always_inline))
#define REMESH_INLINE_MEMBER inline __attribute__((always_inline))

namespace remesh::kernels {
namespace {

// --- elements ---

REMESH_INLINE float get(const float* p, int64_t i) { return p[i]; }
REMESH_INLINE void put(float* p, int64_t i, float v) { p[i] = v; }
REMESH_INLINE float get(const Bf16* p, int64_t i) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(p[i].bits) << 16);
}
REMESH_INLINE void put(Bf16* p, int64_t i, float v) {
  const uint32_t u = __builtin_bit_cast(uint32_t, v);
  const uint32_t rounded = (u + 0x7FFFU + ((u >> 16) & 1U)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40U;
  p[i].bits =
      static_cast<uint16_t>((u & 0x7FFFFFFFU) > 0x7F800000U ? nan : rounded);
}

// e^x to about 2e-7 relative (polynomial of Cephes' expf, Moshier). The
// argument is limited to +-87.3, so the result stays finite; NaN and infinity
// give NaN. The limit is an integer minimum of the magnitude's bits: written
// with floating-point comparisons, the compiler specialises all that follows
// for each case and blends, at three times the cost.
REMESH_INLINE float fast_exp(float v) {
  constexpr uint32_t kMost = __builtin_bit_cast(uint32_t, 87.3F);
  const uint32_t u = __builtin_bit_cast(uint32_t, v);
  const uint32_t size = u & 0x7FFFFFFFU;
  const float x = __builtin_bit_cast(
      float, (u & 0x80000000U) | (size < kMost ? size : kMost));
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adds round to integer
  const float n = (x * 1.44269504088896341F + kRound) - kRound;
  const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * r * r + r + 1.0F;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  return p * __builtin_bit_cast(float, bits) + (v - v);
}

// y (rows) = m (rows, n) x; the rows of m begin `stride` elements apart.
template <typename T>
REMESH_INLINE void dot_rows(int64_t rows, int64_t n, const T* m, int64_t stride,
                            const float* x, float* y) {
  int64_t i = 0;
  for (; i + kMatvecRows <= rows; i += kMatvecRows) {
    const T* m0 = m + i * stride;
    const T* m1 = m0 + stride;
    const T* m2 = m1 + stride;
    const T* m3 = m2 + stride;
    float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t j = 0; j < n; ++j) {
      s0 += get(m0, j) * x[j];
      s1 += get(m1, j) * x[j];
      s2 += get(m2, j) * x[j];
      s3 += get(m3, j) * x[j];
    }
    y[i] = s0;
    y[i + 1] = s1;
    y[i + 2] = s2;
    y[i + 3] = s3;
  }
  for (; i < rows; ++i) {
    const T* row = m + i * stride;
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (int64_t j = 0; j < n; ++j) s += get(row, j) * x[j];
    y[i] = s;
  }
}

// y (n) += x (rows) m (rows, n).
template <typename T>
REMESH_INLINE void add_scaled_rows(int64_t rows, int64_t n, const T* m,
                                   int64_t stride, const float* x, float* y) {
  int64_t i = 0;
  for (; i + kMatvecRows <= rows; i += kMatvecRows) {
    const T* m0 = m + i * stride;
    const T* m1 = m0 + stride;
    const T* m2 = m1 + stride;
    const T* m3 = m2 + stride;
    const float x0 = x[i], x1 = x[i + 1], x2 = x[i + 2], x3 = x[i + 3];
#pragma omp simd
    for (int64_t j = 0; j < n; ++j)
      y[j] +=
          x0 * get(m0, j) + x1 * get(m1, j) + x2 * get(m2, j) + x3 * get(m3, j);
  }
  for (; i < rows; ++i) {
    const T* row = m + i * stride;
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) y[j] += x[i] * get(row, j);
  }
}

// --- attention ---

REMESH_INLINE void fill_zero(float* p, int64_t n) {
  __builtin_memset(p, 0, sizeof(float) * static_cast<size_t>(n));
}

// How many keys of a block query i sees; may be none.
REMESH_INLINE int64_t visible_keys(const AttentionSegment& s, int64_t i) {
  const int64_t n = s.q0 + i - s.k0 + 1;
  return n < 0 ? 0 : (n < s.Tk ? n : s.Tk);
}
// The first key of a block that query i sees, if it sees one.
REMESH_INLINE int64_t first_key(const AttentionSegment& s, int64_t i) {
  const int64_t n = s.window == 0 ? 0 : s.q0 + i - s.k0 + 1 - s.window;
  return n < 0 ? 0 : n;
}

// One finished row of a block (o / sum, whose log-sum-exp is lse) added to the
// running result. sum is 0 if no key was seen: then o is undefined.
REMESH_INLINE void merge_row(int64_t hd, bool first, const float* o, float sum,
                             float lse, float* out, float* out_lse) {
  const float before = first ? -__builtin_inff() : *out_lse;
  const bool none = sum == 0.0F;
  if (none && !first) return;
  const float most = none || before > lse ? before : lse;
  // exp(-inf) is 0: a part in which no key was seen has no weight.
  const float old_weight =
      before == -__builtin_inff() ? 0.0F : fast_exp(before - most);
  const float weight = none ? 0.0F : fast_exp(lse - most);
  const float all = old_weight + weight;
  if (all == 0.0F) {
    for (int64_t j = 0; j < hd; ++j) out[j] = 0;
    *out_lse = -__builtin_inff();
    return;
  }
  const float a = old_weight / all;
  const float b = none ? 0.0F : weight / all / sum;
  if (a == 0.0F) {
    // The old contents are undefined.
#pragma omp simd
    for (int64_t j = 0; j < hd; ++j) out[j] = b * o[j];
  } else {
#pragma omp simd
    for (int64_t j = 0; j < hd; ++j) out[j] = a * out[j] + b * o[j];
  }
  *out_lse = most + __builtin_logf(all);
}

}  // namespace
}  // namespace remesh::kernels
