#include "parallel/jobfile/lr_schedule.h"

#include "tests/testing/expect.h"

namespace remesh::jobfile {
namespace {

LrSchedule schedule(Decay decay) {
  return {.lr = 3e-3,
          .warmup_steps = 2,
          .total_steps = 10,
          .decay = decay,
          .decay_ratio = 0.25,
          .min_lr_factor = 0.1};
}

TEST(LrSchedule, CosineIsAsInTheGoldenFiles) {
  const LrSchedule s = schedule(Decay::kCosine);
  const double want[] = {0.0015,     0.003,      0.003,
                         0.00289724, 0.00260459, 0.00216662};
  for (int i = 0; i < 6; ++i)
    EXPECT_NEAR(learning_rate(s, i), want[i], 5e-9) << i;
  EXPECT_NEAR(learning_rate(s, 10), 3e-4, 1e-15);
  EXPECT_NEAR(learning_rate(s, 1000), 3e-4, 1e-15);
}

TEST(LrSchedule, LinearReachesItsEnd) {
  const LrSchedule s = schedule(Decay::kLinear);
  EXPECT_DOUBLE_EQ(learning_rate(s, 2), 3e-3);
  EXPECT_NEAR(learning_rate(s, 6), 3e-3 * 0.55, 1e-15);
  EXPECT_NEAR(learning_rate(s, 10), 3e-4, 1e-15);
}

TEST(LrSchedule, WsdIsFlatThenFalls) {
  const LrSchedule s = schedule(Decay::kWsd);
  for (int i = 1; i <= 7; ++i) EXPECT_DOUBLE_EQ(learning_rate(s, i), 3e-3);
  EXPECT_NEAR(learning_rate(s, 8), 3e-3 * (1 - 0.9 * 0.2), 1e-15);
  EXPECT_NEAR(learning_rate(s, 10), 3e-4, 1e-15);
}

TEST(LrSchedule, AnyCourseRisesToItsPeakAndNeverRisesAfter) {
  for (const Decay d :
       {Decay::kConstant, Decay::kCosine, Decay::kLinear, Decay::kWsd})
    for (int64_t warmup : {0, 1, 5, 40})
      for (int64_t total : {1, 5, 40})
        for (double ratio : {0.0, 0.3, 1.0}) {
          LrSchedule s = schedule(d);
          s.warmup_steps = warmup;
          s.total_steps = total;
          s.decay_ratio = ratio;
          for (int64_t i = 0; i < 60; ++i) {
            const double now = learning_rate(s, i);
            EXPECT_GT(now, 0);
            EXPECT_LE(now, s.lr);
            if (i == 0) continue;
            const double before = learning_rate(s, i - 1);
            if (i < warmup) {
              EXPECT_GT(now, before);
            } else if (i > warmup) {
              EXPECT_LE(now, before);
            }
          }
        }
}

TEST(LrSchedule, NamesAreReadAndUnknownOnesRefused) {
  EXPECT_EQ(*parse_decay("wsd"), Decay::kWsd);
  EXPECT_EQ(*parse_decay("constant"), Decay::kConstant);
  EXPECT_SAYS(parse_decay("cosin"), "allowed: cosine");
}

}  // namespace
}  // namespace remesh::jobfile
