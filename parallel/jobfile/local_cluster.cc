#include "parallel/jobfile/local_cluster.h"

#include "proto/base/process.h"

namespace remesh::jobfile {

std::string local_cluster_path() {
  const std::string folder = user_state_folder();
  return folder.empty() ? "" : folder + "/hosts/" + host_name() + "/local.toml";
}

}  // namespace remesh::jobfile
