// AdamW for AVX-512, in one pass over memory; part of simd_v4.cc, not a public
// header.
//
// The update is bound by memory. Results that go to other buffers are written
// past the caches in full lines, wherever the buffers begin: an ordinary store
// would first read the line it is about to overwrite. Every element is computed
// by the same instructions, so its bits do not depend on where it is read or
// written.
#pragma once

#include <immintrin.h>

#include "worker/kernels/cpu/simd.h"
#include "worker/kernels/cpu/simd_math.h"

namespace remesh::kernels {
namespace {

// Elements by which the operands are prefetched into the second-level cache.
// The hardware prefetcher does not cross the 4 KB pages that shared memory
// consists of.
constexpr int64_t kAdamWAhead = 2048;

struct AdamWVectors {
  __m512 p, m, v;
};

struct AdamWBroadcast {
  explicit AdamWBroadcast(const AdamWConstants& c)
      : beta1(_mm512_set1_ps(c.beta1)),
        one_minus_beta1(_mm512_set1_ps(c.one_minus_beta1)),
        beta2(_mm512_set1_ps(c.beta2)),
        one_minus_beta2(_mm512_set1_ps(c.one_minus_beta2)),
        step_size(_mm512_set1_ps(c.step_size)),
        denom_scale(_mm512_set1_ps(c.denom_scale)),
        eps(_mm512_set1_ps(c.eps)),
        keep(_mm512_set1_ps(c.keep)),
        grad_scale(_mm512_set1_ps(c.grad_scale)) {}
  __m512 beta1, one_minus_beta1, beta2, one_minus_beta2;
  __m512 step_size, denom_scale, eps, keep, grad_scale;
};

// As adamw_element(), with its sums and products taken together.
REMESH_INLINE AdamWVectors adamw_vectors(const AdamWBroadcast& c, __m512 g,
                                         __m512 p, __m512 m, __m512 v) {
  const __m512 gs = _mm512_mul_ps(g, c.grad_scale);
  m = _mm512_fmadd_ps(c.beta1, m, _mm512_mul_ps(c.one_minus_beta1, gs));
  v = _mm512_fmadd_ps(c.beta2, v,
                      _mm512_mul_ps(_mm512_mul_ps(c.one_minus_beta2, gs), gs));
  // Masked, because g++ 12 warns falsely of the other.
  const __m512 root = _mm512_maskz_sqrt_ps(0xFFFF, v);
  const __m512 denom = _mm512_fmadd_ps(root, c.denom_scale, c.eps);
  p = _mm512_fmsub_ps(p, c.keep,
                      _mm512_mul_ps(c.step_size, _mm512_div_ps(m, denom)));
  return {p, m, v};
}

// Elements from the cache line's begin.
REMESH_INLINE int64_t into_line(const float* p) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) % 64 / 4);
}

// Consecutive vectors of 16 from `to` on, shifted so that each store fills a
// line; the remainder is stored with the next vector.
class LineWriter {
 public:
  explicit LineWriter(float* to)
      : over_(into_line(to)),
        line_(to - over_),
        order_(_mm512_add_epi32(
            _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1,
                             0),
            _mm512_set1_epi32(static_cast<int>(16 - over_)))) {}
  REMESH_INLINE_MEMBER void first(__m512 v) {
    _mm512_mask_storeu_ps(line_, static_cast<__mmask16>(~below()), moved(v));
    advance(v);
  }
  REMESH_INLINE_MEMBER void next(__m512 v) {
    _mm512_stream_ps(line_, moved(v));
    advance(v);
  }
  REMESH_INLINE_MEMBER void finish() const {
    _mm512_mask_storeu_ps(line_, below(), moved(carry_));
  }

 private:
  REMESH_INLINE_MEMBER __mmask16 below() const {
    return static_cast<__mmask16>((1U << over_) - 1U);
  }
  REMESH_INLINE_MEMBER __m512 moved(__m512 v) const {
    return _mm512_permutex2var_ps(carry_, order_, v);
  }
  REMESH_INLINE_MEMBER void advance(__m512 v) {
    carry_ = v;
    line_ += 16;
  }

  int64_t over_;
  float* line_;
  __m512i order_;
  __m512 carry_ = _mm512_setzero_ps();
};

// The arrays of an update, from one element on.
struct AdamWArrays {
  const float *g, *p, *m, *v;
  float *np, *nm, *nv;

  REMESH_INLINE_MEMBER void advance(int64_t n) {
    g += n;
    p += n;
    m += n;
    v += n;
    np += n;
    nm += n;
    nv += n;
  }
};

// The first elements, at most 16.
REMESH_INLINE void adamw_part(const AdamWBroadcast& c, const AdamWArrays& a,
                              int64_t n) {
  const auto mask = static_cast<__mmask16>((1U << n) - 1U);
  const AdamWVectors e = adamw_vectors(
      c, _mm512_maskz_loadu_ps(mask, a.g), _mm512_maskz_loadu_ps(mask, a.p),
      _mm512_maskz_loadu_ps(mask, a.m), _mm512_maskz_loadu_ps(mask, a.v));
  _mm512_mask_storeu_ps(a.np, mask, e.p);
  _mm512_mask_storeu_ps(a.nm, mask, e.m);
  _mm512_mask_storeu_ps(a.nv, mask, e.v);
}

// put(elements) of n / 16 vectors.
template <typename F>
REMESH_INLINE void adamw_vectors_of(const AdamWBroadcast& c, AdamWArrays& a,
                                    int64_t n, const F& put) {
  for (; n >= 16; n -= 16, a.advance(16)) {
    _mm_prefetch(a.g + kAdamWAhead, _MM_HINT_T1);
    _mm_prefetch(a.p + kAdamWAhead, _MM_HINT_T1);
    _mm_prefetch(a.m + kAdamWAhead, _MM_HINT_T1);
    _mm_prefetch(a.v + kAdamWAhead, _MM_HINT_T1);
    const AdamWVectors e =
        adamw_vectors(c, _mm512_loadu_ps(a.g), _mm512_loadu_ps(a.p),
                      _mm512_loadu_ps(a.m), _mm512_loadu_ps(a.v));
    put(e);
  }
}

void adamw_v4(const AdamWConstants& constants, int64_t n, const float* g,
              const float* p, const float* m, const float* v, float* np,
              float* nm, float* nv) {
  const AdamWBroadcast c(constants);
  AdamWArrays a = {g, p, m, v, np, nm, nv};
  // Up to a full line; the arrays usually have the same alignment.
  int64_t head = (16 - into_line(np)) % 16;
  if (head > n) head = n;
  adamw_part(c, a, head);
  a.advance(head);
  n -= head;
  if (constants.stream && n >= 32) {
    LineWriter to_p(a.np), to_m(a.nm), to_v(a.nv);
    adamw_vectors_of(c, a, 16, [&](const AdamWVectors& e) {
      to_p.first(e.p);
      to_m.first(e.m);
      to_v.first(e.v);
    });
    n -= 16;
    adamw_vectors_of(c, a, n, [&](const AdamWVectors& e) {
      to_p.next(e.p);
      to_m.next(e.m);
      to_v.next(e.v);
    });
    to_p.finish();
    to_m.finish();
    to_v.finish();
    _mm_sfence();
  } else {
    adamw_vectors_of(c, a, n, [&](const AdamWVectors& e) {
      _mm512_storeu_ps(a.np, e.p);
      _mm512_storeu_ps(a.nm, e.m);
      _mm512_storeu_ps(a.nv, e.v);
    });
  }
  adamw_part(c, a, n % 16);
}

}  // namespace
}  // namespace remesh::kernels
