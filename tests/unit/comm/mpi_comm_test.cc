// The contract of Comm over MPI, one process per rank; run by mpirun (see
// mpi_comm_test.sh). Exit code 0 on success.
//
//   mpi_comm_test SIZE [SEED]        SIZE: ranks the world must have

#include "parallel/comm/mpi_comm.h"

#include <cstdio>
#include <cstdlib>

#include "parallel/comm/mesh.h"
#include "tests/testing/seed.h"
#include "tests/unit/comm/comm_contract.h"

namespace {

using namespace remesh;  // NOLINT: a test program

int check(comm::MpiWorld& mpi, uint64_t seed) {
  comm::Comm& world = mpi.world();
  auto failures = comm::check_contract(world, seed, 80, 900000);
  auto mesh = comm::Mesh::make(world, {.dp = world.size()});
  if (!mesh.ok() || (*mesh)->data().size() != world.size() ||
      (*mesh)->tp().size() != 1)
    failures.push_back("mesh: wrong groups");
  if (comm::MpiWorld::init({}).ok())
    failures.push_back("a second world in one process is not refused");
  for (const auto& f : failures) std::fprintf(stderr, "%s\n", f.c_str());
  int64_t count = static_cast<int64_t>(failures.size());
  world.all_reduce(std::span(&count, 1), comm::Op::kSum);
  return count == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  auto made = comm::MpiWorld::init({.size = std::atoi(argv[1])});
  if (!made.ok()) {
    std::fprintf(stderr, "%s\n", made.status().to_string().c_str());
    return 3;
  }
  comm::MpiWorld& mpi = **made;
  uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : test_seed();
  mpi.world().broadcast(std::as_writable_bytes(std::span(&seed, 1)), 0);
  if (mpi.rank() == 0)
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  const int rc = check(mpi, seed);
  mpi.finalize();
  return rc;
}
