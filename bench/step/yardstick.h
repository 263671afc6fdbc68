// What the machine can do at best, to hold a training step against: rates of
// plain GEMMs and of memory, measured.
#pragma once

#include <cstdint>

#include "worker/kernels/dtype.h"

namespace remesh::kernels {

// FLOP/s of oneDNN GEMMs of row-major matrices as a linear layer (out, in)
// needs them: forward, gradient of the input and (added) of the weight; the
// best of `repeats` passes on `threads` threads.
double plain_gemm_rate(int threads, Dtype d, int64_t rows, int64_t out,
                       int64_t in, int repeats);

// Bytes/s read and written by `threads` threads that walk arrays far larger
// than the caches: the best of `repeats` passes over each of reading and a
// triad with streaming stores (counted as McCalpin's STREAM does).
double memory_bandwidth(int threads, int repeats);

}  // namespace remesh::kernels
