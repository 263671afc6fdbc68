// Runs one row of a benchmark in the ranks that mpirun started for it.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>

#include "parallel/comm/mpi_comm.h"

namespace remesh::bench {

// Runs measure(MpiWorld&) -> Status between MPI_Init and MPI_Finalize; returns
// the exit code. A failing rank aborts all of them.
template <typename F>
int under_mpi(const char* program, const std::string& row, const F& measure) {
  auto mpi = comm::MpiWorld::init({});
  if (!mpi.ok()) {
    fmt::print(stderr, "{}: {}\n", program, mpi.status().to_string());
    return 3;
  }
  const Status s = measure(**mpi);
  if (!s.ok()) {
    fmt::print(stderr, "{}: {}: {}\n", program, row, s.to_string());
    (*mpi)->abort(1, s.to_string());
  }
  (*mpi)->finalize();
  return 0;
}

}  // namespace remesh::bench
