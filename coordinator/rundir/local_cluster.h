// The description of this machine that `remesh plan measure` has written for
// this user: the cluster `local`, in which a device is a core.
#pragma once

#include <string>

#include "parallel/planner/description.h"
#include "proto/base/status.h"

namespace remesh::rundir {

// In user_state_folder(); "" if there is none.
std::string local_cluster_path();

// A core of it; planner::reference_core() if nothing has been measured. Fails
// if the description is invalid.
Result<planner::Machine> local_core();

}  // namespace remesh::rundir
