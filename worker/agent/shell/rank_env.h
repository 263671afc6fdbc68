// The environment of a rank of Open MPI 4.1 that is started by a PMIx server
// other than mpirun's. Without these settings every rank silently becomes rank
// 0 of 1. Pure functions, except for those that query the host.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "proto/control.pb.h"
#include "worker/agent/shell/mpi_network.h"
#include "worker/agent/shell/pmix_daemon.h"

namespace remesh::agent {

// The placement of a generation, as seen by one worker.
struct LocalPlacement {
  struct Local {
    int rank = 0;
    int threads = 0;  // 0: not specified
  };
  std::vector<Local> local;  // ranks of this worker, ascending
  // Workers with ranks, in the order of the assignment, and their ranks.
  std::vector<PmixNamespace::Node> nodes;
  bool one_host = true;  // all ranks are on one host
  // Cores that all ranks on this worker's host want together.
  int64_t wanted_cores = 0;
};
// Fails on an inconsistent assignment: a rank missing or placed twice, or an
// unknown worker. The message names it.
Result<LocalPlacement> place(const pb::Assignment& assignment,
                             const std::string& worker);

struct MpiSettings {
  std::string shared_folder;  // for MPI's shared-memory files
  // Absent: all ranks belong to one worker and share memory.
  std::optional<MpiNetwork> tcp;
  PortRange ports;
  bool sleep_when_idle = false;  // OpenMP threads sleep between regions
  bool cma = true;               // cross-memory attach works
  int threads = 0;               // of the rank; 0: not specified
};

// `base` (the parent's environment) without the variables of batch systems and
// other MPI launchers, then `pmix`, then the settings.
std::vector<std::string> rank_environment(const std::vector<std::string>& base,
                                          const std::vector<std::string>& pmix,
                                          const MpiSettings& settings);

// The environment of this process.
std::vector<std::string> own_environment();
// Whether process_vm_readv works; some containers forbid it.
bool cma_works();

}  // namespace remesh::agent
