#include "worker/sample/choice.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "tests/testing/seed.h"

namespace remesh::sample {
namespace {

// Probabilities of 0.5, 0.25, 0.125 and 0.125.
const std::vector<float> kHalves = {std::log(2.0F), std::log(1.0F),
                                    std::log(4.0F), std::log(1.0F)};

// The share of each token over evenly spaced random numbers.
std::map<int32_t, double> shares(const ChoiceOptions& options) {
  constexpr int kDraws = 10'000;
  std::map<int32_t, double> out;
  for (int i = 0; i < kDraws; ++i)
    out[choose(kHalves, options, (i + 0.5) / kDraws)] += 1.0 / kDraws;
  return out;
}

TEST(Choice, FollowsTheProbabilities) {
  auto got = shares({});
  EXPECT_NEAR(got[0], 0.25, 2e-3);
  EXPECT_NEAR(got[1], 0.125, 2e-3);
  EXPECT_NEAR(got[2], 0.5, 2e-3);
  EXPECT_NEAR(got[3], 0.125, 2e-3);
  // At half the temperature the squares: 4 : 1 : 16 : 1.
  got = shares({.temperature = 0.5});
  EXPECT_NEAR(got[2], 16.0 / 22, 2e-3);
  EXPECT_NEAR(got[0], 4.0 / 22, 2e-3);
}

TEST(Choice, TakesTheMostLikelyAtTemperatureZero) {
  EXPECT_EQ(choose(kHalves, {.temperature = 0}, 0.99), 2);
  EXPECT_EQ(choose(std::vector<float>{1, 3, 3}, {.temperature = 0}, 0.99), 1)
      << "the first of equals";
}

TEST(Choice, LeavesOutTheUnlikely) {
  auto got = shares({.top_k = 2});
  EXPECT_EQ(got.size(), 2U);
  EXPECT_NEAR(got[2], 2.0 / 3, 2e-3);
  EXPECT_NEAR(got[0], 1.0 / 3, 2e-3);
  EXPECT_EQ(shares({.top_k = 1}).size(), 1U);
  EXPECT_EQ(shares({.top_k = 100}).size(), 4U);
  // 0.5 + 0.25 is enough for 0.7, and for 0.75.
  got = shares({.top_p = 0.7});
  EXPECT_EQ(got.size(), 2U);
  EXPECT_NEAR(got[2], 2.0 / 3, 2e-3);
  EXPECT_EQ(shares({.top_p = 0.5}).size(), 1U);
  EXPECT_EQ(shares({.top_p = 0}).size(), 1U);
  EXPECT_EQ(shares({.top_k = 3, .top_p = 0.99}).size(), 3U);
}

// Against cumulative sums over all tokens in their own order.
TEST(Choice, AgreesWithTheNaiveTwin) {
  std::mt19937_64 rng(test_seed());
  std::uniform_real_distribution<float> logit(-6, 6);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int round = 0; round < 500; ++round) {
    std::vector<float> logits(1 + rng() % 40);
    for (float& x : logits) x = logit(rng);
    const double random = uniform(rng);
    double sum = 0;
    for (const float x : logits) sum += std::exp(static_cast<double>(x));
    double left = random * sum;
    int32_t want = 0;
    for (; want + 1 < static_cast<int32_t>(logits.size()); ++want) {
      const double weight =
          std::exp(static_cast<double>(logits[static_cast<size_t>(want)]));
      if (left < weight) break;
      left -= weight;
    }
    EXPECT_EQ(choose(logits, {}, random), want);
  }
}

}  // namespace
}  // namespace remesh::sample
