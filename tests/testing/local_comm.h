// local_comm: a group of N ranks that are N threads of one process. Same
// contract as mpi_comm (comm.h).
//
// Each thread takes one of the returned Comms and uses it alone. They share
// one state, freed with the last of them; they may be destroyed in any order
// once their thread has finished its last call. Reductions add in rank order.
//
// A rank that leaves while others wait for it hangs them, as with MPI; tests
// run under a time limit.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "parallel/comm/comm.h"

namespace remesh::comm {

// REQUIRES: n >= 1. Entry i has rank i.
std::vector<std::unique_ptr<Comm>> make_local_comms(int n);

// Calls f with the Comm of each of n ranks, in a thread each, and waits.
void on_ranks(int n, const std::function<void(Comm&)>& f);

}  // namespace remesh::comm
