// Assignments: the plan of a generation as its workers get it, made from what
// was decided. No I/O.
#pragma once

#include <deque>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "coordinator/core/api.h"
#include "coordinator/core/cluster_view.h"
#include "coordinator/core/recovery.h"
#include "parallel/planner/shape.h"

namespace remesh::core {

struct Plan {
  pb::Assignment assignment;  // its generation is not set
  // Every live worker participates, with ranks or as a spare, unless it is
  // leaving and has no ranks.
  std::vector<pb::Durable::Member> participants;
};

// shape: of the job's model. measure_links: whether ranks measure the links
// between hosts that are not known. REQUIRES: the placement's workers are
// members.
Plan make_plan(const Recovery::Decision& decision, const ClusterView& view,
               const Options& options,
               const std::optional<planner::JobShape>& shape,
               bool measure_links);

// Gives the generation the recorded steps up to its source. If it continues
// from another branch, the last of them are not those of its own history.
// Without those that a fork to other data has from the run before it; a fork to
// a larger batch loses some of the older ones, too.
// recent: the newest finished steps, in order.
void add_past_steps(const std::vector<pb::StepMetrics>& recent,
                    pb::Assignment* assignment);

// The hosts on which the assignment has ranks. REQUIRES: as above.
std::set<std::string> hosts_of(const pb::Assignment& assignment,
                               const Roster& roster);

}  // namespace remesh::core
