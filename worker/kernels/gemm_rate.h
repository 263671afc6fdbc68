// The GEMM rate that this rank reaches at best. The share of it that a step
// reaches is the GEMM efficiency; MFU refers to the theoretical peak instead.
#pragma once

#include <cstdint>

#include "worker/kernels/backend.h"

namespace remesh::kernels {

// Floating-point operations per second of y (rows, out) = x (rows, in) W^T on
// `backend`: the best of several runs within about `budget_s` seconds, at least
// two, of which the first is a warm-up. 0 if memory does not suffice.
double measure_gemm_rate(Backend& backend, Dtype d, int64_t rows, int64_t out,
                         int64_t in, double budget_s);

}  // namespace remesh::kernels
