// Even shares: the global batch is a fixed list of microbatches, assigned to
// however many data-parallel ranks there are. The list does not depend on the
// mesh, so the gradient of a step is the same sum for every dp.
#pragma once

#include <cstdint>

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

}  // namespace remesh::geometry
