// AdamW in one pass over memory; part of simd_body.h, not a public header.
// simd_adamw_v4.h has it for AVX-512.
//
// The update is bound by memory, so results that go to other buffers are
// written with non-temporal stores where available: an ordinary store would
// first read the line it is about to overwrite.
#pragma once

namespace remesh::kernels {
namespace {

struct AdamWElement {
  float p, m, v;
};

REMESH_INLINE AdamWElement adamw_element(const AdamWConstants& c, float g,
                                         float p, float m, float v) {
  const float gs = g * c.grad_scale;
  m = c.beta1 * m + c.one_minus_beta1 * gs;
  v = c.beta2 * v + c.one_minus_beta2 * gs * gs;
  const float denom = __builtin_sqrtf(v) * c.denom_scale + c.eps;
  p = p * c.keep - c.step_size * (m / denom);
  return {p, m, v};
}

REMESH_INLINE void adamw_range(const AdamWConstants& c, int64_t n,
                               const float* g, const float* p, const float* m,
                               const float* v, float* np, float* nm,
                               float* nv) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const AdamWElement e = adamw_element(c, g[i], p[i], m[i], v[i]);
    np[i] = e.p;
    nm[i] = e.m;
    nv[i] = e.v;
  }
}

void adamw(const AdamWConstants& c, int64_t n, const float* g, const float* p,
           const float* m, const float* v, float* np, float* nm, float* nv) {
#ifdef REMESH_STREAM_STORE
  constexpr int64_t kTile = 256;
  const auto misaligned = [](const float* a) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(a) % 64 / 4);
  };
  const int64_t off = misaligned(np);
  if (c.stream && off == misaligned(nm) && off == misaligned(nv)) {
    const int64_t head = off == 0 ? 0 : (16 - off < n ? 16 - off : n);
    adamw_range(c, head, g, p, m, v, np, nm, nv);
    alignas(64) float tp[kTile];
    alignas(64) float tm[kTile];
    alignas(64) float tv[kTile];
    int64_t i = head;
    for (; i + kTile <= n; i += kTile) {
      adamw_range(c, kTile, g + i, p + i, m + i, v + i, tp, tm, tv);
      for (int64_t j = 0; j < kTile; j += REMESH_LANES)
        REMESH_STREAM_STORE(np + i + j, tp + j);
      for (int64_t j = 0; j < kTile; j += REMESH_LANES)
        REMESH_STREAM_STORE(nm + i + j, tm + j);
      for (int64_t j = 0; j < kTile; j += REMESH_LANES)
        REMESH_STREAM_STORE(nv + i + j, tv + j);
    }
    adamw_range(c, n - i, g + i, p + i, m + i, v + i, np + i, nm + i, nv + i);
    REMESH_STREAM_FENCE();
    return;
  }
#endif
  adamw_range(c, n, g, p, m, v, np, nm, nv);
}

}  // namespace
}  // namespace remesh::kernels
