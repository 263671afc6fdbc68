// Shares of the global batch: a fixed list of microbatches, assigned to however
// many data-parallel ranks there are. The list does not depend on the mesh, so
// the gradient of a step is the same sum for every dp.
#pragma once

#include <cstdint>
#include <vector>

namespace remesh::geometry {

// Microbatches [begin, end) of the global batch.
struct MicrobatchRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const MicrobatchRange&,
                         const MicrobatchRange&) = default;
};

// Part `index` of [0, n): contiguous, in order; the first n % parts parts have
// one element more. The last parts are empty if parts > n.
// REQUIRES: n >= 0, 0 <= index < parts.
MicrobatchRange even_share(int64_t n, int parts, int index);

// Sizes of contiguous parts, in order; empty: even shares.
using Shares = std::vector<int64_t>;

// Shares of n microbatches with which the slowest of ranks that make speeds[i]
// of them in a unit of time takes the least time, one or more for each. Empty
// unless that is at least a twentieth faster than even shares: measured speeds
// vary. REQUIRES: n >= the number of speeds >= 1, all of them above 0.
Shares shares_by_speed(int64_t n, const std::vector<double>& speeds);
// Time of the slowest rank, in that unit.
double slowest_share(int64_t n, const Shares& shares,
                     const std::vector<double>& speeds);

// Part `index` of [0, n). REQUIRES: as many shares as parts, which add up to n,
// or none.
MicrobatchRange share_of(int64_t n, const Shares& shares, int parts, int index);
int64_t largest_share(int64_t n, const Shares& shares, int parts);

}  // namespace remesh::geometry
