// Digest of a training state: 64 bits over every element of the master weights
// and both moments, the same on whatever mesh the state lies. The proof that a
// state came whole through a fault or over to another mesh (train.digest).
//
//   digest = sum mod 2^64, over the elements e of every parameter p, of
//            key(p, e) * (bits of w + A * bits of m + B * bits of v + C)
//
// where key() is a pseudo-random odd 64-bit number: multilinear hashing
// (Carter and Wegman 1979; Lemire and Kaser 2014). A change in a single element
// always shows; any other with a chance of about 2^-32 at most of going
// unseen. Each element is counted by one rank (pieces_to_save()), and the
// digest is the sum over all ranks.
//
// Not for: finding damage in memory or files, which have their checksums.
//
// Pure. Threads: any number at once; each call runs on the caller's.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "parallel/geometry/shard_table.h"
#include "parallel/geometry/zero.h"

namespace remesh::train {

// This rank's part. The vectors have the zero.state_elements() elements of its
// state.
uint64_t state_digest(const geometry::ParamTable& table,
                      const geometry::ShardTable& shard,
                      const geometry::ZeroPlan& zero,
                      std::span<const float> weights,
                      std::span<const float> exp_avg,
                      std::span<const float> exp_avg_sq);

// A part in two numbers that may be added up over 2^31 ranks, as int64_t or
// double, without overflow or rounding:
//
//   auto halves = to_halves(state_digest(...));
//   comm.all_reduce(std::span<int64_t>(halves), comm::Op::kSum);
//   const uint64_t digest = from_halves(halves);
std::array<int64_t, 2> to_halves(uint64_t part);
uint64_t from_halves(const std::array<int64_t, 2>& sums);

}  // namespace remesh::train
