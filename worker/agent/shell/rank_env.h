// What a rank of Open MPI 4.1 must find in its environment when a PMIx server
// other than mpirun's starts it. Pure functions, and one look at the host.
//
// Started without these settings every rank silently becomes rank 0 of 1.
#pragma once

#include <string>
#include <vector>

#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::agent {

// What the placement of a generation means for the ranks of one worker.
struct Placement {
  struct Local {
    int rank = 0;
    int threads = 0;  // 0: not said
  };
  std::vector<Local> local;  // by rank
  // Workers that have ranks, in the assignment's order, and their ranks.
  std::vector<std::pair<std::string, std::vector<int>>> nodes;
  bool one_host = true;  // all ranks are on one host
  // Cores that the ranks of this worker's host want together.
  int64_t wanted_cores = 0;
};
// Fails, naming it, on an assignment that makes no sense: a rank missing or
// twice, an unknown worker.
Result<Placement> place(const pb::Assignment& assignment,
                        const std::string& worker);

struct MpiSettings {
  std::string shared_folder;  // MPI's shared-memory files
  // Interfaces or CIDRs for TCP, comma-separated; "" lets Open MPI choose
  // among all but loopback and container bridges.
  std::string tcp_interfaces;
  bool yield_when_idle = false;  // in MPI calls that wait
  bool sleep_when_idle = false;  // OpenMP threads between parallel regions
  bool cma = true;  // the kernel lets processes copy each other's memory
  int threads = 0;  // of the rank; 0: not said
};

// `base` (a parent's environment) without what batch systems and other MPI
// launchers left in it, then `pmix`, then the settings.
std::vector<std::string> rank_environment(const std::vector<std::string>& base,
                                          const std::vector<std::string>& pmix,
                                          const MpiSettings& settings);

// The environment of this process.
std::vector<std::string> own_environment();
// Whether process_vm_readv works: some containers forbid it.
bool cma_works();
// The network (CIDR) of the interface that leads to the host of `address`
// (tcp://HOST:PORT); "" when that is loopback or cannot be told.
std::string network_towards(const std::string& address);

}  // namespace remesh::agent
