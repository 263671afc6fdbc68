#include "parallel/tune/gaussian_process.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/testing/seed.h"

namespace remesh::tune {
namespace {

double smooth(double a, double b) { return std::sin(3 * a) + b * b; }

TEST(GaussianProcess, PassesNearItsPointsAndIsLessSureBetweenThem) {
  const GaussianProcess p({{0.0}, {0.5}, {1.0}}, {1, 2, 0}, {});
  for (const auto& [x, y] : {std::pair{0.0, 1.0}, {0.5, 2.0}, {1.0, 0.0}}) {
    EXPECT_NEAR(p.predict({x}).mean, y, 0.1) << x;
    EXPECT_LT(p.predict({x}).deviation, p.predict({x + 0.25}).deviation);
  }
}

TEST(GaussianProcess, ReturnsToTheMeanFarAway) {
  const GaussianProcess p({{0.5, 0.5}}, {7}, {.deviation = 2, .mean = 5});
  const auto near = p.predict({0.5, 0.5}), far = p.predict({60, 60});
  EXPECT_NEAR(near.mean, 7, 0.1);
  EXPECT_NEAR(far.mean, 5, 1e-6);
  // Of a variance of 4 that counts as two points, and of one with 2^2.
  EXPECT_NEAR(far.deviation, 2, 0.01);
}

// Values at points that it has not seen: the error is within what it claims.
TEST(GaussianProcess, LearnsAFunctionAndKnowsHowWell) {
  std::mt19937_64 rng(test_seed());
  std::uniform_real_distribution<double> u;
  std::normal_distribution<double> noise(0, 0.02);
  std::vector<Features> x;
  std::vector<double> y;
  for (int i = 0; i < 40; ++i) {
    x.push_back({u(rng), u(rng), u(rng)});  // the third has no effect
    y.push_back(smooth(x.back()[0], x.back()[1]) + noise(rng));
  }
  const GaussianProcess p(x, y, {});
  double squares = 0;
  int within = 0;
  constexpr int kNew = 200;
  for (int i = 0; i < kNew; ++i) {
    const Features at = {u(rng), u(rng), u(rng)};
    const auto got = p.predict(at);
    const double error = got.mean - smooth(at[0], at[1]);
    squares += error * error;
    within += std::fabs(error) <= 3 * got.deviation + 0.02 ? 1 : 0;
  }
  EXPECT_LT(std::sqrt(squares / kNew), 0.1);
  EXPECT_GE(within, kNew * 9 / 10);
}

}  // namespace
}  // namespace remesh::tune
