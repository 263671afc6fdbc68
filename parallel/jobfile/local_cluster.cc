#include "parallel/jobfile/local_cluster.h"

#include <fmt/format.h>

#include <fstream>

#include "proto/base/process.h"

namespace remesh::jobfile {

std::string local_cluster_path() {
  const std::string folder = user_state_folder();
  std::string id;  // "" in many containers
  std::ifstream("/etc/machine-id") >> id;
  return folder.empty() ? ""
                        : fmt::format("{}/hosts/{}{}{}/local.toml", folder,
                                      host_name(), id.empty() ? "" : "-", id);
}

}  // namespace remesh::jobfile
