#include "worker/sample/choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
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

// Cumulative sums over the tokens that are kept, in their own order.
int32_t naive_choice(const std::vector<float>& logits, const ChoiceOptions& o,
                     double random) {
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  if (o.top_k > 0 && o.top_k < std::ssize(order))
    order.resize(static_cast<size_t>(o.top_k));
  const auto weight = [&](size_t i) {
    return std::exp(static_cast<double>(logits[i]) / o.temperature);
  };
  double all = 0, kept = 0;
  for (const size_t i : order) all += weight(i);
  size_t n = 0;
  while (n < order.size() && (n == 0 || kept < o.top_p * all))
    kept += weight(order[n++]);
  std::sort(order.begin(), order.begin() + static_cast<int64_t>(n));
  double left = random * kept;
  size_t at = 0;
  while (at + 1 < n && left >= weight(order[at])) left -= weight(order[at++]);
  return static_cast<int32_t>(order[at]);
}

TEST(Choice, AgreesWithTheNaiveTwin) {
  std::mt19937_64 rng(test_seed());
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int round = 0; round < 1000; ++round) {
    const auto spread = static_cast<float>(8 * uniform(rng));
    std::uniform_real_distribution<float> logit(-spread, spread);
    std::vector<float> logits(1 + rng() % 200);
    for (float& x : logits) x = logit(rng);
    const ChoiceOptions o{.temperature = 0.1 + 2 * uniform(rng),
                          .top_k = static_cast<int64_t>(rng() % 3 * 10),
                          .top_p = round % 2 == 0 ? 1 : uniform(rng)};
    const double random = uniform(rng);
    EXPECT_EQ(choose(logits, o, random), naive_choice(logits, o, random))
        << "temperature " << o.temperature << ", top_k " << o.top_k
        << ", top_p " << o.top_p;
  }
}

TEST(Choice, TakesTheMostLikelyAtAnyLowTemperature) {
  for (const double temperature : {1e-3, 1e-40, 1e-300})
    EXPECT_EQ(choose(kHalves, {.temperature = temperature}, 0.99), 2);
}

}  // namespace
}  // namespace remesh::sample
