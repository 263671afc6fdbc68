#include <gtest/gtest.h>

#include "worker/train/watchdog.h"

namespace remesh::train {
namespace {

TEST(OrphanRule, NeedsBothASilentDaemonAndNoProgress) {
  OrphanRule rule(1000, 60'000);
  // No heartbeat yet: counts from the start.
  EXPECT_FALSE(rule.on_sample(61'000, 0, 0));
  EXPECT_TRUE(rule.on_sample(61'001, 0, 0));
  // A heartbeat or progress restarts the period.
  EXPECT_FALSE(rule.on_sample(62'000, 2'000, 0));
  EXPECT_TRUE(rule.on_sample(62'001, 2'000, 0));
  EXPECT_FALSE(rule.on_sample(62'002, 2'000, 1));
  EXPECT_FALSE(rule.on_sample(122'002, 2'000, 1));
  EXPECT_TRUE(rule.on_sample(122'003, 2'000, 1));
  EXPECT_FALSE(rule.on_sample(500'000, 499'000, 1));
}

}  // namespace
}  // namespace remesh::train
