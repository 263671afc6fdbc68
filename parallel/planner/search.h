// search_layouts: all ways to train a model on a number of devices, ranked by
// the predicted time of a step. Pure.
//
// A plan is a mesh (tensor, pipeline, context and data parallelism whose
// product is the number of devices), a micro-batch, a pipeline schedule with
// its chunks, a ZeRO stage with its shard group, and what is recomputed. Of
// each mesh the fastest plan that fits into memory is returned.
//
// Not every plan is simulated, and the result is as if it were (search_test):
//   memory     a plan over kUsable of the memory is dropped.
//   recompute  of otherwise equal plans only the one that recomputes least and
//              fits: recomputation costs time and saves nothing else.
//   bound      plans are simulated in the order of step_lower_bound_s() until
//              no bound is below the slowest mesh that is asked for.
//   ZeRO       stages 2 and 3 in a pipeline are as stage 1, and are left out.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "parallel/planner/memory.h"
#include "parallel/planner/placement.h"
#include "parallel/planner/step_cost.h"

namespace remesh::planner {

// What a plan must be; -1 and nullopt: anything.
struct PlanLimits {
  Degrees degrees;
  int64_t B = -1;
  int zero_stage = -1;
  std::optional<geometry::ScheduleKind> schedule;
  std::optional<geometry::Recompute> recompute;
  // Tensor-parallel groups may extend over nodes.
  bool tensor_across_nodes = false;
  friend bool operator==(const PlanLimits&, const PlanLimits&) = default;
};

struct SearchRequest {
  Machine machine;
  geometry::ModelConfig model;
  int64_t T = 1;             // tokens of a sequence
  int64_t global_batch = 1;  // sequences of a step
  int64_t devices = 1;
  Execution run;
  PlanLimits limits;
  size_t most = 10;  // meshes to return
  // Where no plan fits, the one that needs least memory is returned.
  bool explain = false;
};

struct Plan {
  JobShape shape;
  geometry::Layout layout;
  StepCost cost;
  MemoryUse memory;  // of the device that needs most
  // "dp4,pp16,tp8 ZeRO 1, micro-batch 1, interleaved x2, recompute full".
  std::string settings() const;
};

struct SearchResult {
  std::vector<Plan> plans;  // the fastest of each mesh, fastest first
  int64_t meshes = 0;       // admissible ones
  int64_t considered = 0;   // plans, as far as `recompute` above needs them
  int64_t fitting = 0;      // of these
  int64_t simulated = 0;    // of these
};

// Fails: InvalidArgument if no mesh is admissible, Exhausted if none fits into
// memory and the request is not to explain; both say why.
Result<SearchResult> search_layouts(const SearchRequest& request);

// As geometry::parse_recompute() reads it.
const char* recompute_name(geometry::Recompute recompute);

// One plan, whether or not it fits. Fails if its mesh is not admissible.
Result<Plan> predict_plan(const SearchRequest& request, JobShape shape,
                          const geometry::Layout& layout);

}  // namespace remesh::planner
