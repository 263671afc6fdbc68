#include "bench/step/yardstick.h"

#include <immintrin.h>

#include <algorithm>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "worker/kernels/cpu/onednn_gemm.h"
#include "worker/kernels/cpu/parallel.h"
#include "worker/kernels/host_memory.h"

namespace remesh::kernels {
namespace {

HostBlock block(int64_t bytes) {
  HostBlock b(host_allocate(static_cast<size_t>(bytes)));
  CHECK_MSG(b != nullptr, "no memory for a measurement");
  return b;
}

template <typename F>
double seconds(const F& f) {
  const int64_t start = monotonic_ns();
  f();
  return static_cast<double>(monotonic_ns() - start) * 1e-9;
}

}  // namespace

double plain_gemm_rate(int threads, Dtype d, int64_t rows, int64_t out,
                       int64_t in, int repeats) {
  const auto size = static_cast<int64_t>(dtype_size(d));
  const HostBlock x = block(rows * in * size);
  const HostBlock y = block(rows * out * size);
  const HostBlock w = block(out * in * size);
  const HostBlock dw = block(out * in * 4);
  OnednnGemm gemm;
  const int before = omp_get_max_threads();
  omp_set_num_threads(threads);
  double best = 1e30;
  for (int i = 0; i <= repeats; ++i) {
    const double s = seconds([&] {
      gemm.run({.m = rows,
                .n = out,
                .k = in,
                .in = d,
                .out = d,
                .b_transposed = true},
               x.get(), w.get(), y.get());
      gemm.run({.m = rows, .n = in, .k = out, .in = d, .out = d}, y.get(),
               w.get(), x.get());
      gemm.run({.m = out,
                .n = in,
                .k = rows,
                .in = d,
                .out = Dtype::kFp32,
                .a_transposed = true,
                .add = true},
               y.get(), x.get(), dw.get());
    });
    if (i > 0) best = std::min(best, s);  // the first compiles
  }
  omp_set_num_threads(before);
  return 6.0 * static_cast<double>(rows * out * in) / best;
}

double memory_bandwidth(int threads, int repeats) {
  constexpr int64_t kFloats = int64_t{32} << 20;
  constexpr int64_t kStripe = 1024;
  const HostBlock a = block(kFloats * 4);
  const HostBlock b = block(kFloats * 4);
  const HostBlock c = block(kFloats * 4);
  auto* pa = static_cast<float*>(a.get());
  const auto* pb = static_cast<const float*>(b.get());
  const auto* pc = static_cast<const float*>(c.get());
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    const double triad = seconds([&] {
      parallel_ranges(threads, kFloats, 1, [&](int64_t i0, int64_t i1, int) {
        const __m128 half = _mm_set1_ps(0.5F);
        // Past the caches: an ordinary store reads what it overwrites.
        for (int64_t j = (i0 + 3) / 4 * 4; j + 4 <= i1; j += 4)
          _mm_stream_ps(pa + j,
                        _mm_add_ps(_mm_load_ps(pb + j),
                                   _mm_mul_ps(half, _mm_load_ps(pc + j))));
        _mm_sfence();
      });
    });
    const double read = seconds([&] {
      parallel_ranges(threads, kFloats, 1, [&](int64_t i0, int64_t i1, int) {
        float sums[kStripe] = {};
        for (int64_t j = i0; j + kStripe <= i1; j += kStripe)
#pragma omp simd
          for (int64_t k = 0; k < kStripe; ++k) sums[k] += pb[j + k];
        pa[i0] = sums[i0 % kStripe];
      });
    });
    best = std::max({best, 12.0 * static_cast<double>(kFloats) / triad,
                     4.0 * static_cast<double>(kFloats) / read});
  }
  return best;
}

}  // namespace remesh::kernels
