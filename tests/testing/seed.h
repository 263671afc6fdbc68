// Seeds of randomized tests. A run without settings takes a new seed and prints
// it; to repeat a failure:
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

// REMESH_TEST_SEED, or a new one.
inline uint32_t test_seed() {
  const char* given = std::getenv("REMESH_TEST_SEED");
  const uint32_t seed =
      given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10))
                       : std::random_device()();
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

}  // namespace remesh
