// Assignments: the plan of a generation as its workers get it, made from what
// was decided, and how it becomes that of the newest generation. No I/O.
#pragma once

#include <optional>
#include <vector>

#include "coordinator/core/api.h"
#include "coordinator/core/cluster_view.h"
#include "coordinator/core/mesh_policy.h"
#include "coordinator/core/recovery.h"
#include "coordinator/core/room.h"
#include "coordinator/core/state_retention.h"
#include "parallel/geometry/param_table.h"
#include "parallel/planner/shape.h"

namespace remesh::core {

struct Plan {
  pb::Assignment assignment;  // its generation is not set
  // Every live worker participates, with ranks or as a spare, unless it is
  // leaving and has no ranks.
  std::vector<pb::Durable::Member> participants;
  Shortages short_of;  // what its states need beyond what there is
};

// Borrows its members.
struct PlanInputs {
  ClusterView view;
  const Options& options;
  const std::optional<planner::JobShape>& shape;  // of the job's model
  const MeshPolicy& policy;
  // Null: the job keeps no states, which need no room.
  const geometry::ParamTable* table = nullptr;
};

// replicas: whether they may be kept. `running`: the assignment of ranks that
// run now, and hold what the plan starts from; null: no rank runs. REQUIRES:
// the placement's workers are members.
Plan make_plan(const Recovery::Decision& decision, const PlanInputs& in,
               bool replicas = true, const pb::Assignment* running = nullptr);
// What would follow if the mesh changed now. Empty in a rescue, which has to
// end, and if there is no mesh or no state to make room for.
Plan plan_of_change(const PlanInputs& in);

// Whether the next mesh cannot take over the state in memory.
bool must_save_for_change(const PlanInputs& in,
                          const StateRetention& retention);

// Makes the plan that of the newest generation of the job.
void adopt_plan(Plan plan, const pb::Job& job, pb::Durable* durable);
// The mesh of the newest generation or, if the journal was lost or the job
// resumed, of the last finished step.
std::optional<pb::Mesh> mesh_before(const pb::Durable& durable,
                                    const StepLedger& ledger);

// Gives the assignment the known steps up to its source, which `generation`
// made. If it continues from another branch, the last of them are not those of
// its own history. Without those that a fork to other data has from the run
// before it; a fork to a larger batch loses some of the older ones, too.
void add_past_steps(const StepLedger& ledger, int64_t generation,
                    const std::vector<CheckpointInfo>& checkpoints,
                    pb::Assignment* assignment);

}  // namespace remesh::core
