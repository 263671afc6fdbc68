// Mutational fuzzing of parsers: valid inputs are changed by bit flips,
// truncations, splices and repetitions. The result is an error or a value,
// never a crash, and takes bounded memory and processor time; sanitizers detect
// more. REMESH_TEST_SEED changes the seed, and REMESH_FUZZ_MUTANTS is the
// number of mutants of each kind of input. The program links
// remesh_allocations.
#pragma once

#include <sys/time.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "tests/testing/allocations.h"
#include "tests/testing/expect.h"
#include "tests/testing/seed.h"

namespace remesh {

inline uint64_t from_env(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : rng_(seed) {}

  // One to four changes of `text`; pieces may come from `other`.
  std::string operator()(std::string text, const std::string& other) {
    for (uint64_t n = 1 + below(4); n > 0; --n) change(text, other);
    return text;
  }
  uint64_t below(uint64_t n) { return n == 0 ? 0 : rng_() % n; }

 private:
  void change(std::string& text, const std::string& other) {
    const size_t at = below(text.size() + 1);
    const size_t n = std::min(below(16) + 1, text.size() - at);
    switch (below(7)) {
      case 0:  // flip a bit
        if (at < text.size())
          text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 1:  // cut off
        text.resize(at);
        break;
      case 2:  // take out
        text.erase(at, n);
        break;
      case 3:  // repeat
        text.insert(at, text.substr(at, n));
        break;
      case 4: {  // splice in
        const size_t from = below(other.size() + 1);
        text.insert(at, other.substr(from, below(32)));
        break;
      }
      case 5: {  // an interesting number, as bytes or as text
        static const char* const kNumbers[] = {"-1",
                                               "0",
                                               "9223372036854775808",
                                               "1e999",
                                               "\xff\xff\xff\xff",
                                               "\"",
                                               "[",
                                               "{",
                                               "nan",
                                               "\n",
                                               "="};
        text.insert(at, kNumbers[below(std::size(kNumbers))]);
        break;
      }
      default:  // overwrite with random bytes
        for (size_t i = at; i < at + n; ++i)
          text[i] = static_cast<char>(below(256));
    }
  }
  std::mt19937_64 rng_;
};

// What a mutant may take; the inputs have less than a MiB. The ids of a
// tokenizer.json go up to 2^22, and each id below the largest takes some 100
// bytes.
constexpr size_t kFuzzBytes = size_t{1} << 30;
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
