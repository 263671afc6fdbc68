// The status of a job, as people and scripts get it. No I/O.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>

#include "coordinator/core/api.h"
#include "coordinator/core/cluster_view.h"
#include "coordinator/core/gathering.h"
#include "coordinator/core/mesh_policy.h"
#include "coordinator/core/step_ledger.h"
#include "parallel/planner/shape.h"

namespace remesh::core {

class StatusReporter {
 public:
  // Borrows its members.
  struct Inputs {
    ClusterView view;
    const Options& options;
    const std::optional<planner::JobShape>& shape;
    const MeshPolicy& policy;
    const StepLedger& ledger;
    bool keeps_state = false;
    const Gathering::Wait& waiting_for;
    std::string put_off;   // why a change of mesh is put off; "": none is
    uint64_t dropped = 0;  // messages that were not taken
  };
  pb::JobStatus status(const Inputs& in);
  void note(const pb::EventRecord& event);  // the newest ones are shown

 private:
  pb::WorkerStatus worker_status(const Inputs& in, const std::string& name,
                                 const Roster::Member& m);
  void fill_prediction(const Inputs& in, pb::RankStatus* rank);

  std::deque<pb::EventRecord> events_;
  // Memory of the ranks of a generation, predicted when it is asked for.
  int64_t predicted_generation_ = -1;
  std::map<int, pb::MemoryUse> predicted_;
};

}  // namespace remesh::core
