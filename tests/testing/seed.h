// Seeds of randomized tests. The suite always takes the same ones, so that it
// gives the same answer each time; tests/fresh.sh takes new ones and prints
// them. To repeat a failure:
//
//   REMESH_TEST_SEED=S REMESH_TEST_CASES=1 PROGRAM --gtest_filter=TEST
//
// A seed that has failed is then listed in its test, where it always runs.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <iostream>
#include <random>
#include <vector>

namespace remesh {

// REMESH_TEST_SEED, or the suite's.
inline uint32_t test_seed() {
  constexpr uint32_t kSuiteSeed = 20261124;
  const char* given = std::getenv("REMESH_TEST_SEED");
  const uint32_t seed =
      given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10))
                       : kSuiteSeed;
  std::cout << "REMESH_TEST_SEED=" << seed << std::endl;
  return seed;
}

// The number of random cases: REMESH_TEST_CASES, or `usual`.
inline int test_cases(int usual) {
  const char* given = std::getenv("REMESH_TEST_CASES");
  return given != nullptr ? std::atoi(given) : usual;
}

// One seed for each case: those that have failed before, unless a seed is
// given, then test_seed() and the numbers after it.
inline std::vector<uint32_t> test_seeds(
    int usual, std::initializer_list<uint32_t> failed = {}) {
  std::vector<uint32_t> seeds;
  if (std::getenv("REMESH_TEST_SEED") == nullptr) seeds = failed;
  const uint32_t first = test_seed();
  for (int i = 0; i < test_cases(usual); ++i)
    seeds.push_back(first + static_cast<uint32_t>(i));
  return seeds;
}

// A random number of the range, bounds included, or one of the values.
template <typename T, typename Random>
T pick(Random& random, T from, T to) {
  return std::uniform_int_distribution<T>(from, to)(random);
}
template <typename T, typename Random>
T one_of(Random& random, std::initializer_list<T> values) {
  return values.begin()[pick(random, size_t{0}, values.size() - 1)];
}

}  // namespace remesh
