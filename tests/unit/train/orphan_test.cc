#include <gtest/gtest.h>

#include "worker/train/watchdog.h"

namespace remesh::train {
namespace {

TEST(OrphanRule, NeedsBothASilentDaemonAndNoProgress) {
  OrphanRule rule(1000, 60'000);
  const auto run = [&](int64_t from, int64_t to, int64_t beat, uint64_t moved) {
    for (int64_t t = from; t < to; t += 1000)
      ASSERT_FALSE(rule.on_sample(t, beat, moved)) << t;
  };
  run(2000, 61'000, 0, 0);
  // No heartbeat yet: counts from the start.
  EXPECT_FALSE(rule.on_sample(61'000, 0, 0));
  EXPECT_TRUE(rule.on_sample(61'001, 0, 0));
  // A heartbeat or progress restarts the period.
  EXPECT_FALSE(rule.on_sample(62'000, 2'000, 0));
  EXPECT_TRUE(rule.on_sample(62'001, 2'000, 0));
  run(62'002, 122'002, 2'000, 1);
  EXPECT_FALSE(rule.on_sample(122'002, 2'000, 1));
  EXPECT_TRUE(rule.on_sample(122'003, 2'000, 1));
  // The whole host was paused.
  EXPECT_FALSE(rule.on_sample(500'000, 2'000, 1));
  run(501'000, 560'000, 2'000, 1);
  EXPECT_TRUE(rule.on_sample(560'001, 2'000, 1));
}

}  // namespace
}  // namespace remesh::train
