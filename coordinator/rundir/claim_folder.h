// claim_folder: one run for each folder of checkpoints.
#pragma once

#include <cstdint>
#include <string>

#include "proto/base/status.h"

namespace remesh::rundir {

// A folder of checkpoints outside of its run directory belongs to the run that
// used it first, whose number and path are in a file there: generations and
// steps of two runs are the same. InvalidArgument if it is another run's,
// unless that run is gone and has saved nothing.
Status claim_folder(const std::string& run, const std::string& folder,
                    uint64_t run_id);

}  // namespace remesh::rundir
