// PmixServer: the PMIx server of the MPI ranks on this host. It provides each
// rank with its identity and the job map, and forwards the fences of MPI_Init
// and MPI_Finalize, which the coordinator relays between hosts.
//
// The calls follow the PMIx standard 4.1, chapters on the server role; the
// mpi/pmix plugin of Slurm and flux-pmix work the same way.
//
// PMIx allows one server per process, so at most one PmixServer exists at a
// time (CHECKed).
//
// Threads: all methods belong to one thread. PMIx makes its upcalls on an
// internal thread; they only queue and signal event_fd(). The methods that
// register and deregister wait a few milliseconds for that thread, which never
// waits for the caller's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::agent {

struct PmixOptions {
  std::string node;     // name of this daemon in every node map
  std::string scratch;  // existing folder for the files of PMIx
};

// One generation of ranks.
struct PmixNamespace {
  std::string name;  // never reused
  struct Node {
    std::string name;
    std::vector<int> ranks;  // ascending
  };
  std::vector<Node> nodes;  // contain each rank of 0..n-1 once
  std::string scratch;      // folder of the ranks on this node
};

// All local ranks of a namespace have entered its fence number `index`, or a
// rank has called MPI_Abort.
struct PmixUpcall {
  enum Kind { kFence, kAbort };
  Kind kind = kFence;
  std::string space;
  int64_t index = 0;
  std::string blob;  // kAbort: the message
  int rank = -1;     // kAbort
  int status = 0;    // kAbort
};

class PmixServer {
 public:
  // Sets PMIX_MCA_gds in the environment of this process and ignores SIGPIPE.
  static Result<std::unique_ptr<PmixServer>> start(const PmixOptions& options);
  virtual ~PmixServer() = default;

  // Readable when take_upcalls() would return something.
  virtual int event_fd() const = 0;
  // Whether PMIx has failed to answer a call. Its thread can deadlock when a
  // rank is killed while it connects (seen with 4.2.2). Since PMIx cannot be
  // restarted within a process, only a new process can start ranks again.
  virtual bool stuck() const = 0;
  virtual std::vector<PmixUpcall> take_upcalls() = 0;

  // REQUIRES: `space` has a node with this daemon's name, with ranks.
  virtual Status register_namespace(const PmixNamespace& space) = 0;
  // Registers a local rank and returns the variables that its environment
  // needs, as "KEY=value".
  virtual Result<std::vector<std::string>> register_rank(
      const std::string& space, int rank) = 0;
  // Completes a fence with the contributions of all ranks. False: no such
  // fence.
  virtual bool complete_fence(const std::string& space, int64_t index,
                              const std::string& blob) = 0;
  // Fails the open fences: MPI_Init returns an error.
  virtual void fail_fences(const std::string& space) = 0;
  // Fails the open fences and removes the namespace. REQUIRES: its local ranks
  // are dead.
  virtual Status deregister(const std::string& space) = 0;
};

}  // namespace remesh::agent
