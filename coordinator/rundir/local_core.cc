#include "coordinator/rundir/local_core.h"

#include "parallel/jobfile/jobfile.h"
#include "parallel/jobfile/local_cluster.h"
#include "parallel/planner/placement.h"
#include "proto/base/file_system.h"

namespace remesh::rundir {

Result<planner::Machine> local_core() {
  const std::string path = jobfile::local_cluster_path();
  if (path.empty() || !path_exists(path)) return planner::reference_core();
  pb::Cluster cluster;
  RETURN_IF_ERROR(jobfile::load_description(path, &cluster));
  return planner::machine_of(cluster);
}

}  // namespace remesh::rundir
