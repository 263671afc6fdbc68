// What the machine can do at best, to hold a training step against: rates of
// GEMMs and of memory, measured.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>

#include "worker/kernels/backend.h"

namespace remesh::bench {

enum class GemmPass { kForward, kInput, kWeight };

// A GEMM of a linear layer (out, in) on so many rows: forward, gradient of the
// input or of the weight.
struct GemmShape {
  GemmPass pass = GemmPass::kForward;
  int64_t rows = 0, out = 0, in = 0;
  kernels::Dtype operands = kernels::Dtype::kFp32;
  kernels::Dtype result = kernels::Dtype::kFp32;
  bool add = false;  // to what the result holds
  double flops() const { return 2.0 * static_cast<double>(rows * out * in); }
  friend auto operator<=>(const GemmShape&, const GemmShape&) = default;
};

// FLOP/s of three ways to compute the same GEMM.
struct GemmRates {
  double plain = 0;   // oneDNN, row-major operands
  double packed = 0;  // oneDNN, the weight packed before; 0: there is none
  double own = 0;     // the backend
  double best() const { return std::max({plain, packed, own}); }
};

// The median of `repeats` calls of each way, which alternate, on the backend's
// threads. Packing is not timed.
GemmRates gemm_rates(kernels::Backend& backend, const GemmShape& shape,
                     int repeats);

// Bytes/s read and written by `threads` threads that walk arrays far larger
// than the caches: the best of `repeats` passes over each of reading and a
// triad with streaming stores (counted as McCalpin's STREAM does).
double memory_bandwidth(int threads, int repeats);

}  // namespace remesh::bench
