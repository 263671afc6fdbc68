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
#include <functional>
#include <map>
#include <memory>
#include <mutex>
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
  ~PmixServer();
  PmixServer(const PmixServer&) = delete;
  PmixServer& operator=(const PmixServer&) = delete;

  // Readable when take_upcalls() would return something.
  int event_fd() const { return event_fd_; }
  // Whether PMIx has failed to answer a call. Its thread can deadlock when a
  // rank is killed while it connects (seen with 4.2.2). Since PMIx cannot be
  // restarted within a process, only a new process can start ranks again.
  bool stuck() const;
  std::vector<PmixUpcall> take_upcalls();

  // REQUIRES: `space` has a node with this daemon's name, with ranks.
  Status register_namespace(const PmixNamespace& space);
  // Registers a local rank and returns the variables that its environment
  // needs, as "KEY=value".
  Result<std::vector<std::string>> register_rank(const std::string& space,
                                                 int rank);
  // Completes a fence with the contributions of all ranks. False: no such
  // fence.
  bool complete_fence(const std::string& space, int64_t index,
                      const std::string& blob);
  // Fails the open fences: MPI_Init returns an error.
  void fail_fences(const std::string& space);
  // Fails the open fences and removes the namespace. REQUIRES: its local ranks
  // are dead.
  Status deregister(const std::string& space);

  // --- on the PMIx thread
  // Ends a fence with what all ranks contribute to it, or, without, fails it.
  using EndFence = std::function<void(const std::string* all)>;
  // False: no such namespace.
  bool on_fence(const std::string& space, std::string blob, EndFence end);
  void on_abort(PmixUpcall upcall);

 private:
  struct Space {
    std::vector<int> registered;  // ranks
    int64_t num_fences = 0;       // entered so far
    std::map<int64_t, EndFence> open;
  };
  PmixServer() = default;
  Status init(const PmixOptions& options);
  void wake();

  std::string node_;
  int event_fd_ = -1;
  bool running_ = false;
  std::mutex mutex_;  // guards the members below
  std::vector<PmixUpcall> upcalls_;
  std::map<std::string, Space> spaces_;
};

}  // namespace remesh::agent
