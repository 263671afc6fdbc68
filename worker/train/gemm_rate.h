// How fast this rank's matrix products can be at best, to hold the step
// against (MFU, as the share of it that the step reaches).
#pragma once

#include <cstdint>

#include "worker/kernels/backend.h"

namespace remesh::train {

// Floating-point operations a second of y (rows, out) = x (rows, in) W^T by
// `backend`, the best of a few within about `budget_s` seconds (at least two
// products, the first of which does not count). 0 when memory is short.
double measure_gemm_rate(kernels::Backend& backend, kernels::Dtype d,
                         int64_t rows, int64_t out, int64_t in,
                         double budget_s);

}  // namespace remesh::train
