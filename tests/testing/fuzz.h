// Mutational fuzzing of parsers: valid inputs are changed by bit flips,
// truncations, splices and repetitions. The result is an error or a value,
// never a crash, and takes bounded memory and processor time; sanitizers detect
// more. REMESH_TEST_SEED changes the seed, and REMESH_FUZZ_MUTANTS is the
// number of mutants of each kind of input. The program links
// remesh_allocations.
#pragma once

#include <sys/time.h>

#include <functional>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "tests/testing/allocations.h"
#include "tests/testing/expect.h"
#include "tests/testing/mutator.h"
#include "tests/testing/seed.h"

namespace remesh {

// What a mutant may take; the inputs have less than a MiB.
constexpr size_t kFuzzBytes = size_t{1} << 28;
constexpr time_t kFuzzCpuSeconds = 60;

// Ends the program (SIGPROF, "Profiling timer expired") when it has used that
// much processor time, unless it is destroyed before.
class CpuLimit {
 public:
  explicit CpuLimit(time_t seconds) { set(seconds); }
  ~CpuLimit() { set(0); }
  CpuLimit(const CpuLimit&) = delete;
  CpuLimit& operator=(const CpuLimit&) = delete;

 private:
  static void set(time_t seconds) {
    const itimerval timer{.it_interval = {}, .it_value = {seconds, 0}};
    setitimer(ITIMER_PROF, &timer, nullptr);
  }
};

// Calls `target` on `rounds` mutants of the inputs, if REMESH_FUZZ_MUTANTS says
// no other number. It returns whether it rejected the mutant; both results must
// occur, or the mutations are ineffective.
inline void fuzz(const std::vector<std::string>& inputs, uint64_t rounds,
                 const std::function<Status(const std::string&)>& target) {
  const uint32_t seed = test_seed();
  rounds = from_env("REMESH_FUZZ_MUTANTS", rounds);
  SCOPED_TRACE("REMESH_TEST_SEED=" + std::to_string(seed));
  Mutator mutate(seed);
  uint64_t refused = 0;
  for (const std::string& input : inputs) ASSERT_OK(target(input));
  for (uint64_t i = 0; i < rounds; ++i) {
    const std::string& a = inputs[mutate.below(inputs.size())];
    const std::string& b = inputs[mutate.below(inputs.size())];
    const std::string mutant = mutate(a, b);
    const CpuLimit limit(kFuzzCpuSeconds);
    reset_allocations();
    const Status status = target(mutant);
    ASSERT_LT(most_allocated(), kFuzzBytes) << "mutant " << i;
    if (status.ok()) continue;
    ++refused;
    ASSERT_FALSE(status.message().empty());
    ASSERT_NE(status.code(), Code::kInternal) << status.to_string();
  }
  EXPECT_GT(refused, rounds / 100);
}

}  // namespace remesh
