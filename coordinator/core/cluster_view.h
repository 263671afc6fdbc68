// ClusterView: what the coordinator knows at one moment. Every decision of the
// core is a pure function of it, of the job and of what was decided before.
#pragma once

#include <cstdint>

#include "coordinator/core/roster.h"
#include "coordinator/core/step_times.h"
#include "proto/control.pb.h"

namespace remesh::core {

// Borrows its members.
struct ClusterView {
  const Roster& roster;
  const pb::Durable& durable;
  int64_t now_ms = 0;
  int64_t phase_since_ms = 0;        // when the current phase began
  const StepTimes* times = nullptr;  // null: nothing is known of them
  int64_t last_finished = 0;         // step in the metrics log
  int64_t saved_step = -1;  // of the newest checkpoint; -1: none is known
  // No decision waits for those who joined later, nor uses them: workers have
  // been joining for too long.
  int64_t joined_by_ms = INT64_MAX;
};

}  // namespace remesh::core
