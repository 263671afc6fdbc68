#include "worker/train/step_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

namespace remesh::train {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(StepPolicy, WithoutALimitEveryStepIsAccepted) {
  StepPolicy p;
  for (const double loss : {1.0, kNan, 1e30}) EXPECT_TRUE(p.accepts(loss, 1));
  EXPECT_EQ(p.limit(), kInf);
}

TEST(StepPolicy, SkipsALimitedNumberOfNonFiniteStepsInARow) {
  StepPolicy p({.most_skipped = 2});
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(p.accepts(kNan, 1));
    EXPECT_FALSE(p.accepts(3, kInf));
    EXPECT_TRUE(p.accepts(3, 1));
  }
  EXPECT_FALSE(p.accepts(kInf, 1));
  EXPECT_FALSE(p.accepts(kInf, 1));
  EXPECT_TRUE(p.accepts(kInf, 1));  // which ends the job
}

TEST(StepPolicy, ASpikeIsFarAboveTheLastLosses) {
  StepPolicy p({.most_skipped = 3, .spike_factor = 5});
  // Losses of 3 to 4 in steps of 0.1, of which the last 64 count.
  for (int i = 0; i < 15; ++i) {
    EXPECT_EQ(p.limit(), kInf);
    EXPECT_TRUE(p.accepts(3 + 0.1 * (i % 11), 1));
  }
  for (int i = 15; i < 200; ++i)
    EXPECT_TRUE(p.accepts(3 + 0.1 * (i % 11), 1)) << i;
  // The median is 3.5, and half of them are within 0.3.
  EXPECT_NEAR(p.limit(), 3.5 + 5 * 1.4826 * 0.3, 0.76);
  EXPECT_TRUE(p.accepts(p.limit() - 1e-9, 1));
  const double limit = p.limit();
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(p.accepts(limit + 0.1, 1));
  EXPECT_EQ(p.limit(), limit);  // what is skipped changes nothing
  EXPECT_TRUE(p.accepts(limit + 0.1, 1));
  // A lower loss never is a spike, and losses that are all alike have a spread.
  EXPECT_TRUE(p.accepts(0, 1));
  for (int i = 0; i < 64; ++i) EXPECT_TRUE(p.accepts(2, 1));
  EXPECT_DOUBLE_EQ(p.limit(), 2 + 5 * 0.01 * 2);
}

// Chats of which a whole batch may be questions.
TEST(StepPolicy, StepsWithoutTargetsDoNotCount) {
  StepPolicy p({.most_skipped = 3, .spike_factor = 5});
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(p.accepts(0, 0));
  EXPECT_TRUE(p.accepts(3, 1));
}

// A generation decides as the one before would have.
TEST(StepPolicy, ContinuesAfterPastSteps) {
  const StepPolicyOptions options{.most_skipped = 2, .spike_factor = 0.5};
  StepPolicy all(options);
  StepPolicy::PastSteps past;
  int skipped = 0;
  for (int i = 0; i < 300; ++i) {
    const bool bad = i % 29 == 7 && !past.rbegin()->skipped();
    const double loss = bad ? kNan : 3 + 0.1 * (i * i % 17);
    StepPolicy here(options, past);
    ASSERT_EQ(here.limit(), all.limit()) << i;
    const bool accepted = all.accepts(loss, 1);
    ASSERT_EQ(here.accepts(loss, 1), accepted) << i;
    pb::Assignment::PastStep* const step = past.Add();
    step->set_loss(loss);
    step->set_skipped(!accepted);
    if (!accepted) ++skipped;
    const auto updates = static_cast<size_t>(std::count_if(
        past.begin(), past.end(), [](const auto& s) { return !s.skipped(); }));
    if (updates > StepPolicy::kWindow) past.erase(past.begin());
  }
  EXPECT_GT(skipped, 50);
}

}  // namespace
}  // namespace remesh::train
