// Rows of a benchmark that need MPI ranks. The program runs itself under mpirun
// once per row; rank 0 prints the row as a JSON object on one line, and the
// program that was started first prints the table and judges the targets.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "bench/targets.h"
#include "parallel/comm/mpi_comm.h"
#include "tests/testing/files.h"

namespace remesh::bench {

using testing::Json;

// Whether mpirun started this process: then it is a rank.
bool started_by_mpirun();

// The cores that this process may run on.
int cores();

// Runs this program with these arguments in so many ranks, which may use all
// cores; returns the rows. show: called with each row when it is printed.
Result<std::vector<Json>> run_in_ranks(
    int ranks, const std::vector<std::string>& arguments,
    const std::function<void(const Json&)>& show = {});

// Runs measure(MpiWorld&) -> Status between MPI_Init and MPI_Finalize; returns
// the exit code. A failing rank aborts all of them.
template <typename F>
int as_rank(const char* program, const F& measure) {
  auto mpi = comm::MpiWorld::init({});
  if (!mpi.ok()) {
    fmt::print(stderr, "{}: {}\n", program, mpi.status().to_string());
    return kExitFailed;
  }
  const Status s = measure(**mpi);
  if (!s.ok()) (*mpi)->abort(kExitFailed, s.to_string());
  (*mpi)->finalize();
  return 0;
}

}  // namespace remesh::bench
