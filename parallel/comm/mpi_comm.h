// mpi_comm: Comm over Open MPI. mpi_comm.cc is the only file that includes
// <mpi.h>.
//
// One MpiWorld a process: MPI cannot be initialised twice. One thread at a
// time uses it and its Comms (MPI_THREAD_SERIALIZED).
//
// Reductions use point-to-point messages and add in rank order (fold.h), not
// MPI_Allreduce: Open MPI picks its order of addition by message size and
// tuning variables (and, for some components, by placement on hosts), and its
// non-blocking all-reduce in place is a tree that moves the full vector log p
// times. Here sums have the same bits whatever the bucket size or placement.
//
// Progress: Open MPI has no progress thread. A non-blocking operation moves
// only while some call of this library runs, so computing code calls
// Request::test() regularly (an all-reduce needs a few calls for every 512 KiB
// or so that it moves; between calls only messages already handed to the kernel
// or placed in shared memory move). Without these calls nearly all the work is
// done inside wait(). Every call advances all operations of the process, so
// ranks may wait for different ones in any order.
//
// split() and destroying a Comm are collective and block; no request may be in
// progress then.
//
// Errors inside MPI end the process (MPI_ERRORS_ARE_FATAL): a rank can do
// nothing useful in a broken world, and its worker sees the exit.
#pragma once

#include <memory>
#include <string>

#include "parallel/comm/comm.h"
#include "proto/base/status.h"

namespace remesh::comm {

struct MpiExpect {
  int size = -1;  // ranks the mesh has; -1: any
  int rank = -1;  // this process's rank; -1: any
};

class MpiWorld {
 public:
  // Initialises MPI. Fails when the world is not the expected one ("world of
  // 1, expected 4": without a launcher MPI silently starts a world of its own).
  // On failure MPI is finalised again if that can be done without waiting for
  // peers.
  static Result<std::unique_ptr<MpiWorld>> init(const MpiExpect& expect);

  // Finalises when finalize() was not called. REQUIRES: its Comms are gone.
  virtual ~MpiWorld() = default;

  // The group of all ranks; owned by this object.
  virtual Comm& world() = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Collective; waits for every rank. After it no Comm may be used.
  virtual void finalize() = 0;
  // Ends all ranks of the world at once, this one with `exit_code`. Does not
  // return. The message goes to stderr.
  [[noreturn]] virtual void abort(int exit_code,
                                  const std::string& message) = 0;
};

}  // namespace remesh::comm
