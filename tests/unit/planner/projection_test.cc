// Failures and checkpoints, compared with a simulation of random failures.
#include "parallel/planner/projection.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/testing/seed.h"

namespace remesh::planner {
namespace {

// Trains for `work` seconds, step by small step, with failures at random.
double simulated(const CheckpointRestart& c, double interval_s, double work,
                 std::mt19937_64& rng) {
  std::exponential_distribution<double> next(1 / c.mtbf_s);
  double elapsed = 0, done = 0, failure = next(rng);
  bool restarting = false;
  while (done < work) {
    const double segment = restarting ? c.restart_s : interval_s + c.save_s;
    if (elapsed + segment <= failure) {
      elapsed += segment;
      if (!restarting) done += interval_s;
      restarting = false;
      continue;
    }
    elapsed = failure;
    failure += next(rng);
    restarting = true;
  }
  return done / elapsed;
}

TEST(Projection, GoodputIsThatOfRandomFailures) {
  std::mt19937_64 rng(test_seed());
  for (const double mtbf : {500.0, 2000.0, 20000.0}) {
    const CheckpointRestart c{.mtbf_s = mtbf, .save_s = 30, .restart_s = 120};
    for (const double interval : {100.0, 400.0}) {
      const double mine = goodput(c, interval);
      EXPECT_NEAR(simulated(c, interval, 5e6, rng) / mine, 1, 0.05)
          << mtbf << " " << interval;
    }
  }
}

TEST(Projection, NoIntervalIsMuchBetterThanDalys) {
  for (const double mtbf : {200.0, 3600.0, 86400.0})
    for (const double save : {1.0, 30.0, 120.0}) {
      const CheckpointRestart c{
          .mtbf_s = mtbf, .save_s = save, .restart_s = 300};
      const double mine = goodput(c, daly_interval_s(c));
      for (double interval = 1; interval < 1e5; interval *= 1.1)
        EXPECT_LE(goodput(c, interval), mine * 1.01)
            << mtbf << " " << save << " " << interval;
    }
}

TEST(Projection, WithoutFailuresOnlySavingCosts) {
  const CheckpointRestart c{.mtbf_s = 1e15, .save_s = 10, .restart_s = 100};
  EXPECT_NEAR(goodput(c, 990), 0.99, 1e-6);
  const InMemoryRecovery r{.mtbf_s = 1e15, .step_s = 1, .replica_share = 0.25};
  EXPECT_NEAR(goodput(r), 0.8, 1e-6);
}

TEST(Projection, RecoveryFromMemoryCostsWhatItSays) {
  // Every 1,000 s: 4 s, half of a step of 2 s, a tenth of the devices for 50 s.
  const InMemoryRecovery r{.mtbf_s = 1000,
                           .recover_s = 4,
                           .step_s = 2,
                           .lost_share = 0.1,
                           .replace_s = 50};
  EXPECT_NEAR(goodput(r), 1000.0 / 1010, 1e-4);
}

TEST(Projection, ALostNodeTakesItsReplicaAlong) {
  EXPECT_DOUBLE_EQ(lost_share(8, {.dp = 64}), 8.0 / 64);
  EXPECT_DOUBLE_EQ(lost_share(8, {.dp = 4, .pp = 2, .tp = 8}), 0.25);
  EXPECT_DOUBLE_EQ(lost_share(8, {.pp = 2, .tp = 8}), 1);
  EXPECT_DOUBLE_EQ(lost_share(8, {.dp = 2, .cp = 2}), 1);
}

// Where failures are about as frequent as steps, many steps never end.
TEST(Projection, RecoveryFromMemoryIsThatOfRandomFailures) {
  std::mt19937_64 rng(test_seed());
  for (const double mtbf : {2.0, 5.0, 50.0}) {
    const InMemoryRecovery r{.mtbf_s = mtbf, .recover_s = 1, .step_s = 6};
    const CheckpointRestart steps{.mtbf_s = mtbf, .restart_s = r.recover_s};
    EXPECT_NEAR(simulated(steps, r.step_s, 2e5, rng) / goodput(r), 1, 0.05)
        << mtbf;
  }
}

TEST(Projection, ADeviceThatWaitsTakesLessPower) {
  Terms t;
  t.gemm = 3;
  EXPECT_DOUBLE_EQ(device_power_w(700, 80, t), 700);
  t.data = 1;
  EXPECT_NEAR(device_power_w(700, 80, t), 700 - 0.18 * 620 / 4, 1e-9);
  EXPECT_NEAR(device_power_w(700, 0, t), 700 - 0.18 * 700 / 4, 1e-9);
  EXPECT_DOUBLE_EQ(device_power_w(0, 80, t), 0) << "unknown";
}

}  // namespace
}  // namespace remesh::planner
