// place_ranks: which slot of which worker each rank of a mesh gets. Pure.
#pragma once

#include <vector>

#include "parallel/planner/placement.h"

namespace remesh::planner {

// Ranks that stay where they were keep their slots, then tensor-parallel peers
// share a host if they can. The ranks of a host share its cores evenly.
// REQUIRES: the workers offer as many slots as the layout has ranks.
std::vector<pb::RankPlace> place_ranks(const PlacementRequest& request,
                                       const geometry::Layout& layout);

}  // namespace remesh::planner
