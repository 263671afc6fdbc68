#include "parallel/tune/tuner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>

#include "tests/testing/seed.h"

namespace remesh::tune {
namespace {

// A grid of three knobs whose predictions are wrong in a smooth way.
struct World {
  std::vector<Candidate> candidates;
  std::vector<double> truth;
};

World make_world(uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal(0, 1);
  const double a = normal(rng), b = normal(rng), c = normal(rng),
               d = normal(rng);
  World w;
  for (int i = 0; i < 6; ++i)
    for (int j = 0; j < 5; ++j)
      for (int k = 0; k < 4; ++k) {
        const double x = i / 5.0, y = j / 4.0, z = k / 3.0;
        const double predicted = 1 + 0.5 * std::cos(2 * x + y);
        const double error =
            0.25 * (a * x + b * y * y + c * z + d * x * z) + 0.01 * normal(rng);
        w.candidates.push_back({.knobs = {double(i), double(j), double(k)},
                                .predicted_s = predicted});
        w.truth.push_back(predicted * std::exp(error));
      }
  return w;
}

TEST(Tuner, FindsTheBestWithinThreePercentInAQuarterOfTheTrials) {
  int found = 0;
  constexpr int kWorlds = 20;
  const uint64_t seed = test_seed();
  for (int n = 0; n < kWorlds; ++n) {
    const World w = make_world(seed + static_cast<uint64_t>(n));
    Tuner t(w.candidates);
    while (t.trials().size() < w.candidates.size() / 4) {
      const auto next = t.next();
      if (!next) break;
      t.add({*next, w.truth[*next]});
    }
    const double best = *std::min_element(w.truth.begin(), w.truth.end());
    found += *t.best()->step_s <= 1.03 * best ? 1 : 0;
  }
  EXPECT_GE(found, kWorlds - 1);
}

TEST(Tuner, TriesEachCandidateOnce) {
  const World w = make_world(test_seed());
  Tuner t(w.candidates, {.least_gain = 0});
  std::set<size_t> tried;
  while (const auto next = t.next()) {
    EXPECT_TRUE(tried.insert(*next).second) << *next;
    t.add({*next, w.truth[*next]});
  }
  EXPECT_EQ(tried.size(), w.candidates.size());
}

// The third of the candidates that the model takes for the fastest fails, as
// for lack of memory.
TEST(Tuner, FindsTheBestOfThoseThatRun) {
  const World w = make_world(test_seed());
  const auto fails = [&](size_t i) { return w.candidates[i].knobs[0] >= 4; };
  double best = 1e9;
  for (size_t i = 0; i < w.truth.size(); ++i)
    if (!fails(i)) best = std::min(best, w.truth[i]);
  Tuner t(w.candidates);
  size_t failures = 0;
  while (const auto next = t.next()) {
    failures += fails(*next) ? 1 : 0;
    t.add({*next, fails(*next) ? std::nullopt : std::optional(w.truth[*next])});
  }
  EXPECT_LE(*t.best()->step_s, 1.03 * best);
  EXPECT_LE(failures, 20U);
  EXPECT_LE(t.trials().size(), 40U);
}

TEST(Tuner, StopsWhenNothingIsExpectedToGain) {
  const World w = make_world(test_seed());
  Tuner t(w.candidates);
  while (const auto next = t.next())
    t.add({*next, w.candidates[*next].predicted_s});  // the model is right
  EXPECT_LE(t.trials().size(), 12U);
  EXPECT_EQ(t.best()->candidate, t.trials()[0].candidate);
  EXPECT_DOUBLE_EQ(t.prediction_error(), 0);
}

// As after `remesh tune --every`. A process with a point for each trial would
// take hours.
TEST(Tuner, LearnsFromThousandsOfTrials) {
  constexpr size_t kCandidates = 5000;
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < kCandidates; ++i)
    candidates.push_back(
        {.knobs = {double(i % 10), double(i / 10 % 20), double(i / 200)}});
  const auto truth = [](size_t i) { return std::exp(0.02 * double(i % 10)); };
  Tuner t(candidates);
  for (size_t i = 0; i < kCandidates; ++i)
    t.add({i, i % 7 == 0 ? std::nullopt : std::optional(truth(i))});
  EXPECT_FALSE(t.next().has_value());
  const std::vector<double> estimates = t.estimates();
  for (size_t i = 0; i < kCandidates; ++i)
    EXPECT_NEAR(estimates[i] / truth(i), 1, 0.03) << i;
}

// By its definition: the mean over all orders in which knobs become known.
std::vector<double> shapley_by_orders(const std::vector<Candidate>& c,
                                      const std::vector<double>& values) {
  const size_t knobs = c[0].knobs.size();
  std::vector<double> out(knobs);
  for (size_t i = 0; i < c.size(); ++i) {
    std::vector<size_t> order(knobs);
    for (size_t k = 0; k < knobs; ++k) order[k] = k;
    std::vector<double> sum(knobs);
    int orders = 0;
    do {
      const auto worth = [&](size_t known) {
        double total = 0;
        int n = 0;
        for (size_t j = 0; j < c.size(); ++j) {
          bool agrees = true;
          for (size_t k = 0; k < known; ++k)
            agrees &= c[j].knobs[order[k]] == c[i].knobs[order[k]];
          if (!agrees) continue;
          total += values[j];
          ++n;
        }
        return total / n;
      };
      for (size_t k = 0; k < knobs; ++k)
        sum[order[k]] += worth(k + 1) - worth(k);
      ++orders;
    } while (std::next_permutation(order.begin(), order.end()));
    for (size_t k = 0; k < knobs; ++k) out[k] += std::fabs(sum[k] / orders);
  }
  for (double& x : out) x /= static_cast<double>(c.size());
  return out;
}

TEST(Shapley, IsTheMeanOverAllOrders) {
  std::mt19937_64 rng(test_seed());
  std::uniform_int_distribution<int> knob(0, 2);
  std::normal_distribution<double> value;
  std::vector<Candidate> c;
  std::vector<double> v;
  for (int i = 0; i < 30; ++i) {
    c.push_back({.knobs = {double(knob(rng)), double(knob(rng)),
                           double(knob(rng)), 1.0}});
    v.push_back(value(rng));
  }
  const auto got = shapley_effects(c, v), want = shapley_by_orders(c, v);
  ASSERT_EQ(got.size(), want.size());
  for (size_t k = 0; k < got.size(); ++k) EXPECT_NEAR(got[k], want[k], 1e-12);
  EXPECT_EQ(got[3], 0);  // it never varies
}

TEST(Shapley, DividesASumAmongItsTerms) {
  std::vector<Candidate> c;
  std::vector<double> v;
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) {
      c.push_back({.knobs = {double(i), double(j)}});
      v.push_back(3.0 * i + 1.0 * j);
    }
  const auto got = shapley_effects(c, v);
  EXPECT_DOUBLE_EQ(got[0], 1.5);
  EXPECT_DOUBLE_EQ(got[1], 0.5);
}

}  // namespace
}  // namespace remesh::tune
