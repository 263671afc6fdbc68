// Sends hostile messages to the real cores of simulated jobs while these train,
// crash and change their mesh: each job must do exactly what it does without
// them, and memory must not grow.
//
//   hostile_fuzz [messages=40000] [first seed]
#include <sys/resource.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "tests/sim/cluster.h"
#include "tests/testing/seed.h"

namespace remesh::sim {
namespace {

constexpr int64_t kMaxGrowthKiB = 64 << 10;

int64_t memory_kib() {
  rusage usage{};
  CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
  return usage.ru_maxrss;
}

SimStats run_job(uint64_t seed, bool calm) {
  Cluster cluster({.seed = seed, .hostile = 25, .calm = calm});
  const std::string violation = cluster.run();
  CHECK_MSG(violation.empty(), violation.c_str());
  return cluster.stats();
}

int run(int64_t messages, uint64_t seed) {
  const double began = unix_seconds();
  int64_t sent = 0;
  int64_t jobs = 0;
  int64_t first_kib = 0;
  for (; sent < messages; ++seed, ++jobs) {
    const SimStats calm = run_job(seed, /*calm=*/true);
    const SimStats hostile = run_job(seed, /*calm=*/false);
    const std::string changed =
        "hostile messages changed the job of seed " + std::to_string(seed);
    CHECK_MSG(calm.hostile == hostile.hostile &&
                  calm.digest_of_decisions == hostile.digest_of_decisions,
              changed.c_str());
    sent += hostile.hostile;
    if (jobs == 0) first_kib = memory_kib();
    CHECK_MSG(memory_kib() - first_kib < kMaxGrowthKiB, "memory grows");
  }
  std::printf(
      "hostile_fuzz: %lld hostile messages in %lld jobs changed nothing, %.1f "
      "s, %lld MiB\n",
      static_cast<long long>(sent), static_cast<long long>(jobs),
      unix_seconds() - began, static_cast<long long>(memory_kib() >> 10));
  return 0;
}

}  // namespace
}  // namespace remesh::sim

int main(int argc, char** argv) {
  const int64_t messages = argc > 1 ? std::atoll(argv[1]) : 40'000;
  const uint64_t seed =
      argc > 2 ? std::strtoull(argv[2], nullptr, 10) : remesh::test_seed();
  return remesh::sim::run(messages, seed);
}
