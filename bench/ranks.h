// Rows of a benchmark that need MPI ranks. The program runs itself under mpirun
// once per row; rank 0 prints the row as a JSON object on one line, and the
// program that was started first prints the table and judges the targets.
#pragma once

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "bench/targets.h"
#include "parallel/comm/mpi_comm.h"
#include "tests/testing/files.h"

namespace remesh::bench {

using testing::Json;

// Runs this program with these arguments in so many ranks, which may use all
// cores; returns the rows. show: called with each row when it is printed.
Result<std::vector<Json>> run_in_ranks(
    int ranks, const std::vector<std::string>& arguments,
    const std::function<void(const Json&)>& show = {});

// The same, of arguments that make a single row.
Result<Json> run_row(int ranks, const std::vector<std::string>& arguments);

// The rest of main(): run_all(options) -> exit code starts ranks; each of them
// runs measure(options, MpiWorld&) -> Status between MPI_Init and MPI_Finalize.
// A failing rank aborts all of them.
template <typename Options, typename RunAll, typename Measure>
int run_with_ranks(const char* program, const Options& options,
                   const RunAll& run_all, const Measure& measure) {
  if (std::getenv("OMPI_COMM_WORLD_RANK") == nullptr) return run_all(options);
  auto mpi = comm::MpiWorld::init({});
  if (!mpi.ok()) return failed(program, mpi.status().to_string());
  const Status s = measure(options, **mpi);
  if (!s.ok()) (*mpi)->abort(kExitFailed, s.to_string());
  (*mpi)->finalize();
  return 0;
}

}  // namespace remesh::bench
