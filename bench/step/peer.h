// The peer of bench_step: a program that trains the same model with PyTorch.
//
// It is run as `/usr/bin/python3 FILE --size S --batch B --seq T --threads N
// --steps K [--bf16]` and prints "tokens/s=X" of a step (its best after the
// first).
#pragma once

#include <cstdint>
#include <string>

#include "bench/options.h"
#include "proto/base/status.h"

namespace remesh::bench {

// Tokens per second.
Result<double> run_peer(const std::string& file, const ModelOptions& o,
                        int threads, int steps);

// The BLAS that PyTorch uses, by what it computes and has mapped: without one
// it falls back to loops that no comparison may count on.
struct PeerBlas {
  double sgemm_rate = 0;  // FLOP/s on the same threads
  std::string libraries;
};
Result<PeerBlas> find_blas(int threads);

// Why there can be no ratio, or "". our_rate: FLOP/s of an fp32 product here.
std::string blas_problem(const PeerBlas& blas, double our_rate);

}  // namespace remesh::bench
