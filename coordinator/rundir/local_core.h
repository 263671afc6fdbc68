// A core of this machine, as it was measured.
#pragma once

#include "parallel/planner/description.h"
#include "proto/base/status.h"

namespace remesh::rundir {

// A core by the description at jobfile::local_cluster_path();
// planner::reference_core() if nothing has been measured. Fails if the
// description is invalid.
Result<planner::Machine> local_core();

}  // namespace remesh::rundir
