// StateRetention: how long the training state in a worker's memory is needed,
// so that no worker leaves, and no job stops, with the only copy of finished
// steps. The states that a generation started from are needed until its own
// ranks have states, and replicas of them.
//
// A value without I/O.
#pragma once

#include <set>
#include <string>

#include "coordinator/core/cluster_view.h"
#include "coordinator/core/mesh_policy.h"

namespace remesh::core {

// The hosts on which a placement has ranks.
std::set<std::string> hosts_of(const planner::Placement& placement,
                               const Roster& roster);

class StateRetention {
 public:
  // keeps_state: whether the job keeps states in memory at all.
  StateRetention(const pb::Elastic& elastic, bool keeps_state)
      : elastic_(elastic), keeps_state_(keeps_state) {}
  bool keeps_state() const { return keeps_state_; }

  void begin_generation() { handed_off_ = false; }
  // Notes from when on the states that the generation started from are not
  // needed: each rank has its own, and a further step shows that replicas were
  // made of them.
  void observe(const ClusterView& view);

  // Workers with ranks of the newest generation, or with states that it was to
  // start from, that are not here.
  std::set<std::string> missing_holders(const ClusterView& view) const;
  // Whether a generation can be expected to start: there are slots enough, or
  // may be soon.
  bool expects_generation(const ClusterView& view,
                          const MeshPolicy& policy) const;
  // Whether this worker must not leave yet.
  bool needs_memory_of(const ClusterView& view, const MeshPolicy& policy,
                       const std::string& worker) const;
  // Whether the ranks must save a checkpoint when they stop, because the state
  // does not survive in memory where the next generation runs.
  bool must_save_to_finish(const ClusterView& view,
                           const MeshPolicy& policy) const;
  // Whether finished steps are in memory alone, which ends with the job: then a
  // generation must restore and save them before the job stops, unless it is to
  // stop without saving.
  bool must_save_before_stop(const ClusterView& view,
                             const MeshPolicy& policy) const;
  // Whether the job waits before it stops although nobody who is here holds
  // them: the holders may return, or may not have found this coordinator yet.
  bool awaits_unsaved_steps(const ClusterView& view) const;
  // Whether a state in memory, of a member or of a worker that may return, is
  // newer than every checkpoint known. After steps were lost the last finished
  // step is no measure: nobody has it.
  bool has_unsaved_steps(const ClusterView& view) const;
  // Whether the member holds such a state, or has not said what it holds.
  bool holds_unsaved_step(const ClusterView& view,
                          const Roster::Member& member) const;
  // Where the newest one is, for people; "" if there is none.
  std::string only_in_memory(const ClusterView& view) const;

 private:
  pb::Elastic elastic_;
  bool keeps_state_ = false;
  bool handed_off_ = false;
};

}  // namespace remesh::core
