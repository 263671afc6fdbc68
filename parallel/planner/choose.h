// choose_layout: which of the meshes that the job and its slots admit. The part
// of place_mesh() that a better planner would replace. Pure.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "parallel/planner/memory.h"
#include "parallel/planner/placement.h"

namespace remesh::planner {

struct LayoutChoice {
  geometry::Layout layout;
  std::string limit;            // what keeps the mesh from being larger
  std::string prediction;       // Placement.prediction
  std::set<std::string> hosts;  // the only ones to use; empty: all
};

// Slots of all workers.
int64_t offered_slots(const PlacementRequest& request);

// The request if there were only these hosts.
PlacementRequest only_on(PlacementRequest request,
                         const std::set<std::string>& hosts);

// REQUIRES: the request's numbers are in range, which place_mesh() checks.
// predictor: of the request's shape; null if it has none. *short_of_memory:
// whether memory rules out a larger mesh, or one that is preferred. Fails like
// place_mesh().
Result<LayoutChoice> choose_layout(const PlacementRequest& request,
                                   MemoryPredictor* predictor,
                                   bool* short_of_memory);

}  // namespace remesh::planner
