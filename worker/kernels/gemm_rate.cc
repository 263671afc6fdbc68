#include "worker/kernels/gemm_rate.h"

#include <memory>

#include "proto/base/clock.h"

namespace remesh::kernels {

double measure_gemm_rate(Backend& backend, Dtype d, int64_t rows, int64_t out,
                         int64_t in, double budget_s) {
  const auto buffer = [&](int64_t n, size_t size) {
    return std::unique_ptr<void, Release>(
        backend.allocate(static_cast<size_t>(n) * size), {&backend});
  };
  const auto w = backend.make_weight(d, out, in);
  const auto master = buffer(out * in, sizeof(float));
  const auto x = buffer(rows * in, dtype_size(d));
  const auto y = buffer(rows * out, dtype_size(d));
  if (!w || !master || !x || !y) return 0;
  backend.load_weight(*w, static_cast<const float*>(master.get()));
  const int64_t begin = monotonic_ns();
  double best_s = 0;
  for (int i = 0;; ++i) {
    const int64_t at = monotonic_ns();
    backend.linear(*w, x.get(), rows, d, y.get());
    backend.synchronize();
    const int64_t now = monotonic_ns();
    const double s = static_cast<double>(now - at) * 1e-9;
    if (i == 1 || (i > 1 && s < best_s)) best_s = s;
    if (i >= 1 && static_cast<double>(now - begin) * 1e-9 > budget_s) break;
  }
  const double flops = 2.0 * static_cast<double>(rows) *
                       static_cast<double>(out) * static_cast<double>(in);
  return best_s > 0 ? flops / best_s : 0;
}

}  // namespace remesh::kernels
