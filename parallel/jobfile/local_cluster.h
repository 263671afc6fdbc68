// The description of this machine (proto/cluster.proto), in which a device is a
// core: `remesh plan measure` writes it, and a worker that the coordinator has
// asked for it.
#pragma once

#include <string>

namespace remesh::jobfile {

// In user_state_folder(), for each host of a shared home, by its name and
// /etc/machine-id; "" if there is none.
std::string local_cluster_path();

}  // namespace remesh::jobfile
