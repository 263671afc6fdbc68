// Digest of a training state: a 64-bit hash of all elements of the master
// weights and both moments, which does not depend on the mesh. It proves that a
// state survived a fault or a change of the mesh unchanged (train.digest).
//
//   digest = sum mod 2^64, over the elements e of every parameter p, of
//            key(p, e) * (bits of w + A * bits of m + B * bits of v + C)
//
// where key() is a pseudo-random odd 64-bit number: multilinear hashing
// (Carter and Wegman 1979; Lemire and Kaser 2014). It detects every change of a
// single element, and misses other changes with a probability of at most about
// 2^-32. Each element is counted by one rank (pieces_to_save()), and the digest
// is the sum over all ranks.
//
// Not for detecting damage in memory or files, which have checksums.
//
// Pure.
#pragma once

#include <array>
#include <cstdint>

#include "parallel/geometry/sharding.h"
#include "parallel/geometry/state_vectors.h"

namespace remesh::train {

// This rank's part of the digest.
uint64_t state_digest(const geometry::RankShard& rank,
                      const geometry::ConstStateView& state);

// Splits a part into two numbers that can be summed over 2^31 ranks without
// overflow:
//
//   auto halves = to_halves(state_digest(...));
//   comm.all_reduce(std::span<int64_t>(halves), comm::Op::kSum);
//   const uint64_t digest = from_halves(halves);
std::array<int64_t, 2> to_halves(uint64_t part);
uint64_t from_halves(const std::array<int64_t, 2>& sums);

}  // namespace remesh::train
