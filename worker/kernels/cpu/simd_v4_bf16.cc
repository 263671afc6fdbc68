// The loops over bf16 for hosts with AVX512-BF16; the rest is simd_v4's. A
// bf16 is the upper half of an fp32, so a register of 32 of them is processed
// as its even and its odd elements, at one operation each. As in
// simd_body.h no library templates are used.
#include <immintrin.h>

#include "worker/kernels/cpu/simd.h"
#include "worker/kernels/cpu/simd_exp2.h"
#include "worker/kernels/cpu/simd_math.h"

namespace remesh::kernels {
namespace {

// 32 elements; missing ones are `rest`.
struct Pair {
  __m512 even, odd;
};

REMESH_INLINE __mmask32 first(int64_t n) {
  return n >= 32 ? ~0U : (1U << n) - 1U;
}
REMESH_INLINE Pair load(const Bf16* p, __mmask32 mask, uint16_t rest = 0) {
  const __m512i v = _mm512_mask_loadu_epi16(
      _mm512_set1_epi16(static_cast<int16_t>(rest)), mask, p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(
              v, _mm512_set1_epi32(static_cast<int>(0xFFFF0000U))))};
}
REMESH_INLINE __m512i rounded(Pair x) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11,
                                         26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const auto v = (__m512i)_mm512_cvtne2ps_pbh(x.odd, x.even);
  return _mm512_permutexvar_epi16(order, v);
}
REMESH_INLINE void store(Bf16* p, __mmask32 mask, Pair x) {
  _mm512_mask_storeu_epi16(p, mask, rounded(x));
}
// The same past the caches for full lines: an ordinary store reads what it
// overwrites. The caller fences.
REMESH_INLINE void stream(Bf16* p, __mmask32 mask, Pair x) {
  if (mask == ~0U && reinterpret_cast<uintptr_t>(p) % 64 == 0)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), rounded(x));
  else
    store(p, mask, x);
}
template <typename F>
REMESH_INLINE Pair each(const F& f) {
  return {f([](const Pair& p) { return p.even; }),
          f([](const Pair& p) { return p.odd; })};
}

REMESH_INLINE __m512 broadcast(float v) { return _mm512_set1_ps(v); }

// 1 / (1 + e^-x).
REMESH_INLINE __m512 sigmoid(__m512 x) {
  // Limited, because the reciprocal of infinity would make NaN below.
  const __m512 e = exp2_512(
      _mm512_min_ps(broadcast(126.0F), _mm512_mul_ps(x, broadcast(-kLog2e))));
  const __m512 d = _mm512_add_ps(broadcast(1.0F), e);
  const __m512 r = _mm512_rcp14_ps(d);  // and one step of Newton's method
  return _mm512_mul_ps(r, _mm512_fnmadd_ps(d, r, broadcast(2.0F)));
}

// e^(x - zero), exactly 1 where they are equal.
REMESH_INLINE __m512 exp_above(__m512 x, __m512 zero) {
  return exp2_512(_mm512_mul_ps(_mm512_sub_ps(x, zero), broadcast(kLog2e)));
}

// Prefetches the next row, which the hardware would start late.
template <typename T>
REMESH_INLINE void fetch(const T* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

void swiglu(const Bf16* gu, int64_t rows, int64_t dim, Bf16* y) {
  for (int64_t i = 0; i < rows; ++i, gu += 2 * dim, y += dim)
    for (int64_t j = 0; j < dim; j += 32) {
      fetch(gu + 2 * dim + j);
      fetch(gu + 3 * dim + j);
      const __mmask32 mask = first(dim - j);
      const Pair g = load(gu + j, mask);
      const Pair u = load(gu + dim + j, mask);
      stream(y + j, mask, each([&](auto of) {
               return _mm512_mul_ps(_mm512_mul_ps(of(g), sigmoid(of(g))),
                                    of(u));
             }));
    }
  _mm_sfence();
}

void swiglu_backward(const Bf16* gu, const Bf16* dy, int64_t rows, int64_t dim,
                     Bf16* dgu, Bf16* y) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < dim; j += 32) {
      fetch(gu + 2 * dim + j);
      fetch(gu + 3 * dim + j);
      fetch(dy + dim + j);
      const __mmask32 mask = first(dim - j);
      const Pair g = load(gu + j, mask);
      const Pair u = load(gu + dim + j, mask);
      const Pair d = load(dy + j, mask);
      const Pair s = each([&](auto of) { return sigmoid(of(g)); });
      const Pair silu =
          each([&](auto of) { return _mm512_mul_ps(of(g), of(s)); });
      stream(y + j, mask,
             each([&](auto of) { return _mm512_mul_ps(of(silu), of(u)); }));
      // s (1 + g (1 - s)) = s + silu - silu s
      store(dgu + j, mask, each([&](auto of) {
              const __m512 slope = _mm512_fnmadd_ps(
                  of(silu), of(s), _mm512_add_ps(of(s), of(silu)));
              return _mm512_mul_ps(_mm512_mul_ps(of(d), of(u)), slope);
            }));
      store(dgu + dim + j, mask,
            each([&](auto of) { return _mm512_mul_ps(of(d), of(silu)); }));
    }
    gu += 2 * dim;
    dgu += 2 * dim;
    dy += dim;
    y += dim;
  }
  _mm_sfence();
}

constexpr uint16_t kMinusInfinity = 0xFF80;

void cross_entropy_add(const Bf16* logits, int64_t rows, int64_t cols,
                       int64_t col0, const int32_t* targets, bool first_piece,
                       float* row_max, float* row_sum, float* target) {
  for (int64_t i = 0; i < rows; ++i, logits += cols) {
    __m512 most = broadcast(-__builtin_inff());
    for (int64_t j = 0; j < cols; j += 32) {
      const Pair x = load(logits + j, first(cols - j), kMinusInfinity);
      // The second operand is kept when it is NaN.
      most = _mm512_max_ps(_mm512_max_ps(most, x.even), x.odd);
    }
    float top = _mm512_reduce_max_ps(most);
    if (!first_piece && row_max[i] > top) top = row_max[i];
    const __m512 zero = broadcast(top);
    Pair sum = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t j = 0; j < cols; j += 32) {
      fetch(logits + cols + j);
      const Pair x = load(logits + j, first(cols - j), kMinusInfinity);
      sum = each([&](auto of) {
        return _mm512_add_ps(of(sum), exp_above(of(x), zero));
      });
    }
    const float here = _mm512_reduce_add_ps(_mm512_add_ps(sum.even, sum.odd));
    row_sum[i] =
        first_piece ? here : row_sum[i] * fast_exp(row_max[i] - top) + here;
    row_max[i] = top;
    const int64_t t = targets[i] - col0;
    if (t >= 0 && t < cols)
      target[i] = get(logits, t);
    else if (first_piece)
      target[i] = 0;
  }
}

void cross_entropy_backward(const Bf16* logits, int64_t rows, int64_t cols,
                            int64_t col0, const int32_t* targets,
                            const float* lse, float scale, float z_loss,
                            Bf16* dlogits) {
  for (int64_t i = 0; i < rows; ++i, logits += cols, dlogits += cols) {
    if (targets[i] < 0) {
      __builtin_memset(dlogits, 0, sizeof(Bf16) * static_cast<size_t>(cols));
      continue;
    }
    const float weight = 1.0F + 2.0F * z_loss * lse[i];  // of exp()
    const int64_t t = targets[i] - col0;
    const bool mine = t >= 0 && t < cols;
    const float at_target = mine ? get(logits, t) : 0.0F;
    const __m512 zero = broadcast(lse[i]);
    for (int64_t j = 0; j < cols; j += 32) {
      fetch(logits + cols + j);
      const __mmask32 mask = first(cols - j);
      const Pair x = load(logits + j, mask);
      store(dlogits + j, mask, each([&](auto of) {
              return _mm512_mul_ps(broadcast(weight * scale),
                                   exp_above(of(x), zero));
            }));
    }
    if (mine)
      put(dlogits, t, (fast_exp(at_target - lse[i]) * weight - 1.0F) * scale);
  }
}

void rmsnorm(const float* x, const float* branch, const float* w, float eps,
             int64_t rows, int64_t dim, float* sum, Bf16* y, float* rstd) {
  // The sum is read again much later, if it does not replace x.
  const bool past =
      sum != x && dim % 16 == 0 && reinterpret_cast<uintptr_t>(sum) % 64 == 0;
  const auto part = [&](const float* p, int64_t j, __mmask16 mask) {
    return _mm512_maskz_loadu_ps(mask, p + j);
  };
  for (int64_t i = 0; i < rows; ++i, x += dim, y += dim) {
    const float* b = branch != nullptr ? branch + i * dim : nullptr;
    float* out = branch != nullptr ? sum + i * dim : nullptr;
    // With and without a branch the same rows give the same bits, which
    // recomputation of activations relies on.
    __m512 squares = _mm512_setzero_ps();
    for (int64_t j = 0; j < dim; j += 16) {
      const auto mask = static_cast<__mmask16>(first(dim - j));
      __m512 s = part(x, j, mask);
      fetch(x + dim + j);
      if (b != nullptr) {
        s = _mm512_add_ps(s, part(b, j, mask));
        fetch(b + dim + j);
      }
      squares = _mm512_fmadd_ps(s, s, squares);
    }
    const float r = 1.0F / __builtin_sqrtf(_mm512_reduce_add_ps(squares) /
                                               static_cast<float>(dim) +
                                           eps);
    rstd[i] = r;
    for (int64_t j = 0; j < dim; j += 16) {
      const auto mask = static_cast<__mmask16>(first(dim - j));
      __m512 s = part(x, j, mask);
      if (b != nullptr) {
        s = _mm512_add_ps(s, part(b, j, mask));
        if (past)
          _mm512_stream_ps(out + j, s);
        else
          _mm512_mask_storeu_ps(out + j, mask, s);
      }
      const __m512 v =
          _mm512_mul_ps(_mm512_mul_ps(s, broadcast(r)), part(w, j, mask));
      _mm256_mask_storeu_epi16(y + j, mask, (__m256i)_mm512_cvtneps_pbh(v));
    }
  }
  _mm_sfence();
}

// Cosines or sines of one position, apart as Pair has them.
REMESH_INLINE Pair load_table(const float* p, int64_t n) {
  const auto mask = [](int64_t left) {
    return static_cast<__mmask16>(
        left >= 16 ? 0xFFFF : (1U << (left > 0 ? left : 0)) - 1U);
  };
  const __m512 lo = _mm512_maskz_loadu_ps(mask(n), p);
  const __m512 hi = n > 16 ? _mm512_maskz_loadu_ps(mask(n - 16), p + 16)
                           : _mm512_setzero_ps();
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12,
                                        10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {_mm512_permutex2var_ps(lo, even, hi),
          _mm512_permutex2var_ps(lo, odd, hi)};
}

void rope(Bf16* x, int64_t row0, int64_t rows, int64_t seq, int64_t heads,
          int64_t hd, int64_t stride, const float* cos, const float* sin,
          float sign) {
  const int64_t half = hd / 2;
  for (int64_t n = row0; n < row0 + rows; ++n)
    for (int64_t j = 0; j < half; j += 32) {
      const __mmask32 mask = first(half - j);
      const Pair c = load_table(cos + n % seq * half + j, half - j);
      const Pair s0 = load_table(sin + n % seq * half + j, half - j);
      const Pair s =
          each([&](auto of) { return _mm512_mul_ps(of(s0), broadcast(sign)); });
      for (int64_t h = 0; h < heads; ++h) {
        Bf16* lo = x + n * stride + h * hd + j;
        const Pair a = load(lo, mask);
        const Pair b = load(lo + half, mask);
        store(lo, mask, each([&](auto of) {
                return _mm512_fnmadd_ps(of(b), of(s),
                                        _mm512_mul_ps(of(a), of(c)));
              }));
        store(lo + half, mask, each([&](auto of) {
                return _mm512_fmadd_ps(of(a), of(s),
                                       _mm512_mul_ps(of(b), of(c)));
              }));
      }
    }
}

}  // namespace

const SimdOps& simd_v4_bf16() {
  static const SimdOps kOps = [] {
    SimdOps ops = simd_v4();
    ops.name = "avx512_bf16";
    ops.bf16.rmsnorm = rmsnorm;
    ops.bf16.swiglu = swiglu;
    ops.bf16.swiglu_backward = swiglu_backward;
    ops.bf16.cross_entropy_add = cross_entropy_add;
    ops.bf16.cross_entropy_backward = cross_entropy_backward;
    ops.bf16.rope = rope;
    return ops;
  }();
  return kOps;
}

}  // namespace remesh::kernels
