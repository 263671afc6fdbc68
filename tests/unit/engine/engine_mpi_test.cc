// The engine over MPI, one process per rank, gives the same bits as over
// threads; run by mpirun (see engine_mpi_test.sh). Exit code 0 on success.
//
//   engine_mpi_test SIZE [CASES [SEED]]    SIZE: ranks the world must have

#include <cstdio>
#include <cstdlib>

#include "parallel/comm/mpi_comm.h"
#include "tests/testing/seed.h"
#include "tests/unit/engine/engine_fixture.h"

namespace remesh::engine {
namespace {

int check(comm::MpiWorld& mpi, int cases, uint64_t seed) {
  int64_t failures = 0;
  for (int done = 0; done < cases; ++seed) {
    const Case c = random_case(seed, mpi.size());
    if (c.layout.world() != mpi.size()) continue;
    ++done;
    const Outcome got = run_rank(c, mpi.world());
    const char* why = nullptr;
    if (!got.status.ok()) why = "failed";
    if (mpi.rank() == 0 && why == nullptr) {
      const Outcome want = run_case(c);
      if (got.loss != want.loss || got.norm != want.norm ||
          got.evaluated != want.evaluated)
        why = "other bits than over threads";
    }
    if (why != nullptr) {
      ++failures;
      std::fprintf(stderr, "rank %d: %s: %s %s\n", mpi.rank(), why,
                   c.to_string().c_str(), got.status.to_string().c_str());
    }
  }
  mpi.world().all_reduce(std::span(&failures, 1), comm::Op::kSum);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace remesh::engine

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  auto made = remesh::comm::MpiWorld::init({.size = std::atoi(argv[1])});
  if (!made.ok()) {
    std::fprintf(stderr, "%s\n", made.status().to_string().c_str());
    return 3;
  }
  remesh::comm::MpiWorld& mpi = **made;
  const int cases = argc > 2 ? std::atoi(argv[2]) : 8;
  uint64_t seed =
      argc > 3 ? std::strtoull(argv[3], nullptr, 10) : remesh::test_seed();
  mpi.world().broadcast(std::as_writable_bytes(std::span(&seed, 1)), 0);
  if (mpi.rank() == 0)
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  const int rc = remesh::engine::check(mpi, cases, seed);
  mpi.finalize();
  return rc;
}
