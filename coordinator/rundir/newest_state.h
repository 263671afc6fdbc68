// The newest step of a run, and where its state is, as this host can see it:
// in the metrics log, in checkpoints, and in the shared memory of this user's
// workers here, dead or alive. Every program that compares a number of steps
// with what was trained, or says how a run can continue, asks here.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "coordinator/core/api.h"
#include "proto/base/file_system.h"
#include "proto/control.pb.h"

namespace remesh::rundir {

struct NewestState {
  // Newest finished step known; its state may be gone.
  int64_t step = 0;
  // The newest complete state; INIT: there is none.
  pb::Source::Kind source = pb::Source::INIT;
  int64_t state_step = 0;
  std::string path;             // of a checkpoint
  int64_t checkpoint_step = 0;  // of the newest usable checkpoint; 0: none
  double kept_until = 0;  // memory: unix seconds, if no worker returns before
  std::set<std::string> folders;  // memory: of its segments
};

// The first step of each generation of the run, from its metrics log and, if it
// has one, its journal: by them core::abandoned_by() tells which checkpoints
// and states the run continued without.
std::vector<core::FirstStep> branches_of(const std::string& run,
                                         const pb::Durable* journal);

// `journal`: of the run; null if it has none, then nothing is known of memory.
// What cannot be read does not count.
NewestState newest_state(FileSystem& fs, const std::string& run,
                         const pb::Job& job, const pb::Durable* journal);

// "step 887 is in the memory of this host until 12:30:05", or "... in
// checkpoint PATH"; "" if there is no state.
std::string state_text(const NewestState& newest);

}  // namespace remesh::rundir
