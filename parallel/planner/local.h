// remesh's own ranks in the cost model (step_cost.h): a rank is a device that
// has some cores of a host. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "parallel/planner/layer_cost.h"
#include "parallel/planner/placement.h"
#include "parallel/planner/rank_placement.h"
#include "parallel/planner/step_cost.h"

namespace remesh::planner {

// How worker/engine computes and communicates.
Execution engine_execution(const JobShape& shape);

// A job in bf16 runs in fp32 where one host lacks bf16, which the measured
// rates of its cores show: they are the same in both
// (worker/measure/measured.cc). The functions below take the shape as it is.
void match_hosts(PlacementRequest* request);

// What ranks get of the hosts, in meshes of one request, which must outlive it.
class RankShares {
 public:
  explicit RankShares(const PlacementRequest& request);

  // A rank of a mesh of `world` ranks that fill the request's hosts in the
  // order of RankPlacer. Rates are those of the slowest rank: of a core, times
  // the cores that it keeps busy; the ranks of a host share its link to the
  // network. memory_bytes: the smallest share of a host's memory, 0 if unknown;
  // tensor groups may be placed differently (memory()).
  Machine machine(int64_t world) const;

  // The smallest share of a host's memory that a rank of this mesh has; 0 if
  // unknown. Depends on the layout's world() and tp alone.
  double memory(const geometry::Layout& layout) const;

 private:
  struct Host {
    const Machine* slowest = nullptr;  // of its cores
    double link = 0;
  };
  const PlacementRequest& request_;
  const RankPlacer placer_;
  std::vector<Host> hosts_;  // of placer_.hosts()
};
Machine rank_machine(const PlacementRequest& request, int64_t world);
double rank_memory(const PlacementRequest& request,
                   const geometry::Layout& layout);

// The shares of the microbatches that data-parallel ranks on those places get;
// even without request.by_speed, a shape, or a measured core of every host.
geometry::Shares shares_on(const PlacementRequest& request,
                           const geometry::Layout& layout,
                           const std::vector<pb::RankPlace>& places);

// A step by the cost model. REQUIRES: the request has a shape that admits the
// layout, and slots for it.
StepCost predict_step(const PlacementRequest& request,
                      const geometry::Layout& layout);

// By how much the cost model is wrong: measured over predicted, of the meshes
// in request.measured.
struct ModelError {
  double factor = 1;  // geometric mean
  // By how much a mesh that was not measured may be slower than expected: one
  // standard deviation, at least a quarter; 1 if nothing was measured.
  double uncertainty = 1;
};
ModelError model_error(const PlacementRequest& request);

// As it was measured, if it was.
std::optional<double> measured_step_s(const PlacementRequest& request,
                                      const geometry::Layout& layout);

// The step time by which place_mesh() ranks meshes of the same size: what was
// measured, else what is predicted times the error and the uncertainty. So a
// mesh that is known is left only for one that promises clearly more.
double expected_step_s(const PlacementRequest& request,
                       const geometry::Layout& layout);

}  // namespace remesh::planner
