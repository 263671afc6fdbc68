// The global batch as a fixed list of microbatches, dealt to the data-parallel
// ranks there are, evenly or not. The list never changes with the mesh, so the
// gradient of a step is the same sum whatever dp is.
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

// The share of one rank: contiguous, in order of dp_index; the first
// num_microbatches % dp ranks get one more. Empty for the last ranks when
// dp > num_microbatches.
// REQUIRES: num_microbatches >= 0, 0 <= dp_index < dp.
MicrobatchRange deal(int64_t num_microbatches, int dp, int dp_index);

}  // namespace remesh::geometry
