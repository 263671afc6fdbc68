// 2^x on AVX-512 registers. In an unnamed namespace, as simd_body.h says. Not a
// public header.
#pragma once

#include <immintrin.h>

#include "worker/kernels/cpu/simd_math.h"

namespace remesh::kernels {
namespace {

constexpr float kLog2e = 1.44269504088896341F;

// To about 2e-6 relative. Large arguments overflow; below -126, 2^-126; NaN
// stays.
REMESH_INLINE __m512 exp2_512(__m512 x) {
  // max takes the second operand if one is NaN.
  x = _mm512_max_ps(_mm512_set1_ps(-126.0F), x);
  const __m512 n = _mm512_roundscale_ps(x, 0x08);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.33335581e-3F);  // ln(2)^k / k!
  const auto next = [&](float c) {
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
  };
  next(9.61812911e-3F);
  next(5.55041087e-2F);
  next(2.40226507e-1F);
  next(6.93147181e-1F);
  next(1.0F);
  return _mm512_scalef_ps(p, n);
}

}  // namespace
}  // namespace remesh::kernels
