// RankState: a read-only view of the training state of one rank.
#pragma once

#include <cstdint>

#include "parallel/geometry/state_vectors.h"

namespace remesh::train {

// Borrows the vectors, which are in the order of ZeroPlan::state_offset.
struct RankState {
  int64_t step = 0;  // updates made
  geometry::ConstStateView vectors;
};

}  // namespace remesh::train
