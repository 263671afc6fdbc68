#include "coordinator/core/step_times.h"

#include <gtest/gtest.h>

#include <limits>

namespace remesh::core {
namespace {

using Measured = std::vector<planner::MeasuredStep>;

void add(StepTimes* t, int n, double seconds, int64_t now_ms = 0) {
  for (int i = 0; i < n; ++i) t->add_step(seconds, now_ms);
}

Measured measured(const StepTimes& t, const std::set<std::string>& hosts,
                  int64_t now_ms = 0) {
  return t.measured(hosts, now_ms);
}

constexpr int64_t kHourMs = 3'600'000;

TEST(StepTimes, AMeshIsMeasuredByTheMedianOfItsStepsButTheFirst) {
  StepTimes t;
  add(&t, 10, 1);  // of no mesh
  t.begin({.dp = 2}, {"a", "b"});
  add(&t, 2, 90);
  add(&t, 4, 1);
  EXPECT_EQ(measured(t, {"a", "b"}), Measured{});
  add(&t, 1, 50);
  EXPECT_EQ(measured(t, {"a", "b"}), (Measured{{{.dp = 2}, 1, {"a", "b"}}}));
  add(&t, 20, 1.05);  // a small difference
  EXPECT_EQ(measured(t, {"a", "b"}), (Measured{{{.dp = 2}, 1, {"a", "b"}}}));
  add(&t, 20, 2);
  EXPECT_EQ(measured(t, {"a", "b", "c"}),
            (Measured{{{.dp = 2}, 2, {"a", "b"}}}));
  EXPECT_EQ(measured(t, {"a", "c"}), Measured{}) << "other hosts";
}

TEST(StepTimes, MeshesAreKeptApart) {
  StepTimes t;
  t.begin({.dp = 2}, {"a"});
  add(&t, 9, 1);
  t.begin({.tp = 2}, {"a"});
  add(&t, 9, 3);
  t.begin({.dp = 2}, {"b"});
  add(&t, 9, 5);
  EXPECT_EQ(measured(t, {"a"}),
            (Measured{{{.dp = 2}, 1, {"a"}}, {{.tp = 2}, 3, {"a"}}}));
  EXPECT_EQ(measured(t, {"b"}), (Measured{{{.dp = 2}, 5, {"b"}}}));
}

TEST(StepTimes, AMeshIsForgottenAnHourAfterItsLastStep) {
  StepTimes t;
  t.begin({.dp = 4}, {"a", "b"});
  add(&t, 9, 3, 1000);
  t.begin({.dp = 2}, {"a"});
  add(&t, 9, 1, 1000);
  add(&t, 1, 1, kHourMs);
  EXPECT_EQ(measured(t, {"a", "b"}, kHourMs + 999).size(), 2u);
  EXPECT_EQ(measured(t, {"a", "b"}, kHourMs + 1000),
            (Measured{{{.dp = 2}, 1, {"a"}}}));
}

TEST(StepTimes, TheSlowestLinkOfTheHostsCounts) {
  StepTimes t;
  EXPECT_TRUE(t.knows_link({"a"}));
  EXPECT_FALSE(t.knows_link({"a", "b"}));
  t.begin({.dp = 2}, {"a", "b"});
  t.set_link(0, 0);
  EXPECT_FALSE(t.knows_link({"a", "b"}));
  t.set_link(1e9, 0);
  t.begin({.dp = 2}, {"b", "c"});
  t.set_link(1e8, 1000);
  EXPECT_TRUE(t.knows_link({"a", "b"}));
  EXPECT_FALSE(t.knows_link({"a", "c"}));
  EXPECT_EQ(t.link_bytes_per_s({"a", "b"}), 1e9);
  EXPECT_EQ(t.link_bytes_per_s({"a", "b", "c"}), 1e8);
  EXPECT_EQ(t.link_bytes_per_s({"a", "c"}), 0);
  t.set_link(2e8, kHourMs);
  EXPECT_FALSE(t.knows_link({"a", "b"})) << "after an hour";
  EXPECT_EQ(t.link_bytes_per_s({"a", "b", "c"}), 2e8);
}

TEST(StepTimes, NonsenseIsNotCounted) {
  StepTimes t;
  t.begin({.dp = 2}, {"a"});
  add(&t, 9, 0);
  add(&t, 9, -1);
  add(&t, 9, std::numeric_limits<double>::infinity());
  add(&t, 9, std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(measured(t, {"a"}).empty());
}

TEST(StepTimes, PausesAndFailures) {
  StepTimes t(1000);
  EXPECT_EQ(t.pause_s(), 5);
  EXPECT_FALSE(t.resume(1000)) << "was not interrupted";
  for (const int64_t s : {2, 100, 3}) {
    t.interrupt(1000);
    t.interrupt(1001);
    t.begin({}, {}, s);
    const auto pause = t.resume(1000 + s * 1000);
    ASSERT_TRUE(pause);
    EXPECT_EQ(pause->seconds, double(s));
    EXPECT_EQ(pause->lost_steps, s);
  }
  EXPECT_EQ(t.pause_s(), 3);
  constexpr double kDay = 24 * 3600;
  EXPECT_EQ(t.until_failure_s(1000), kDay);
  t.add_failure();
  EXPECT_EQ(t.until_failure_s(1000 + 3'600'000), (kDay + 3600) / 2);
}

}  // namespace
}  // namespace remesh::core
