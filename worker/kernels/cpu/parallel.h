// Splits ranges of work over OpenMP threads. Private to this folder.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace remesh::kernels {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// f(first, last, thread) over [0, n) in contiguous ranges, one per thread, of
// at least `grain` where possible. The range that an element is in must not
// affect its value.
template <typename F>
void parallel_ranges(int threads, int64_t n, int64_t grain, const F& f) {
  const int64_t wanted = std::min<int64_t>(threads, ceil_div(n, grain));
  if (wanted <= 1) {
    if (n > 0) f(int64_t{0}, n, 0);
    return;
  }
#pragma omp parallel num_threads(static_cast <int>(wanted))
  {
    const int64_t count = omp_get_num_threads();
    const int64_t me = omp_get_thread_num();
    const int64_t i0 = n * me / count;
    const int64_t i1 = n * (me + 1) / count;
    if (i0 < i1) f(i0, i1, static_cast<int>(me));
  }
}

}  // namespace remesh::kernels
