// PmixServer: the PMIx server that MPI ranks on this host report to. It tells
// them who and where they are, and passes the fences of MPI_Init and
// MPI_Finalize on to whoever relays them. <pmix_server.h> stays in the .cc.
//
// What the calls are and why: PMIx standard 4.1, chapters on the server role;
// Slurm's mpi/pmix plugin and flux-pmix work the same way.
//
// PMIx allows one server a process, so at most one PmixServer exists at a
// time (CHECKed).
//
// Threads: all methods belong to one thread. PMIx makes its upcalls on a
// thread of its own; they only queue, and wake event_fd(). The methods that
// register and deregister wait for that thread, some milliseconds; it never
// waits for ours.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::agent {

struct PmixOptions {
  std::string node;     // this daemon's name in every node map
  std::string scratch;  // existing folder for PMIx's own files
};

// One generation of ranks.
struct PmixNamespace {
  std::string name;  // unique for ever
  struct Node {
    std::string name;
    std::vector<int> ranks;  // ascending
  };
  std::vector<Node> nodes;  // every rank of 0..n-1 once
  std::string scratch;      // of the ranks on this node
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
  // Sets PMIX_MCA_gds in this process's environment, and ignores SIGPIPE.
  static Result<std::unique_ptr<PmixServer>> start(const PmixOptions& options);
  virtual ~PmixServer() = default;

  // Readable when take_upcalls() has something.
  virtual int event_fd() const = 0;
  // PMIx left a call without an answer. Its thread can lock itself out when a
  // rank is killed in the middle of connecting (seen with 4.2.2), and a process
  // has one PMIx: only a new process can start ranks again.
  virtual bool stuck() const = 0;
  virtual std::vector<PmixUpcall> take_upcalls() = 0;

  // REQUIRES: a node of that name is in `space`, with ranks.
  virtual Status register_namespace(const PmixNamespace& space) = 0;
  // Registers a local rank and returns what its environment needs, as
  // "KEY=value".
  virtual Result<std::vector<std::string>> register_rank(
      const std::string& space, int rank) = 0;
  // Answers a fence with everybody's contributions. False: no such fence.
  virtual bool complete_fence(const std::string& space, int64_t index,
                              const std::string& blob) = 0;
  // Fails the open fences and forgets the namespace. REQUIRES: its local
  // ranks are dead.
  virtual Status deregister(const std::string& space) = 0;
};

}  // namespace remesh::agent
