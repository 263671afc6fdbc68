#include "proto/base/blocking_calls.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>

namespace remesh {
namespace {

constexpr int64_t kLong = 60'000;

TEST(BlockingCalls, FinishBeforeTheirObject) {
  const auto ended = std::make_shared<std::atomic<int>>(0);
  {
    BlockingCalls calls(kLong);
    EXPECT_TRUE(calls.within(kLong, [ended] { ++*ended; }));
    EXPECT_EQ(*ended, 1);
    for (int i = 0; i < 20; ++i)
      EXPECT_TRUE(calls.start([ended] { ++*ended; }));
  }
  EXPECT_EQ(*ended, 21);
}

TEST(BlockingCalls, DoNotDelayTheirOwnerWhenTheyBlock) {
  std::promise<void> gate;
  const auto open = gate.get_future().share();
  const auto ended = std::make_shared<std::atomic<int>>(0);
  const auto block = [open, ended] {
    open.wait();
    ++*ended;
  };
  {
    BlockingCalls calls(/*grace_ms=*/1);
    EXPECT_FALSE(calls.within(1, block));
    // Now it is known to block, so no patience is used up again.
    EXPECT_FALSE(calls.within(kLong, block));
    EXPECT_FALSE(calls.within(kLong, [] {}));
    while (calls.start(block)) {
    }
    EXPECT_FALSE(calls.within(kLong, [] {}));
    EXPECT_EQ(*ended, 0);
    gate.set_value();
    while (!calls.within(kLong, [] {})) {
    }
  }
  BlockingCalls others(kLong);
  while (*ended < 3)
    EXPECT_TRUE(others.within(kLong, [] {}));  // they outlived their object
}

}  // namespace
}  // namespace remesh
