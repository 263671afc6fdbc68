#include "coordinator/server/rate_limit.h"

#include <gtest/gtest.h>

namespace remesh::server {
namespace {

int admitted(RateLimit& rate, const std::string& peer, int messages,
             int64_t now_ms) {
  int n = 0;
  for (int i = 0; i < messages; ++i) n += rate.admits(peer, now_ms) ? 1 : 0;
  return n;
}

TEST(RateLimit, AFloodIsCutToTheRateAndOthersAreNotConcerned) {
  RateLimit rate;
  EXPECT_EQ(admitted(rate, "flood", 100'000, 0), kMessageBurst);
  EXPECT_EQ(admitted(rate, "calm", 200, 0), 200);
  EXPECT_EQ(admitted(rate, "flood", 100'000, 100), kMessagesPerS / 10);
  EXPECT_EQ(admitted(rate, "flood", 100'000, 60'000), kMessageBurst);
}

TEST(RateLimit, EndedConnectionsAreForgotten) {
  RateLimit rate;
  for (int i = 0; i < 1000; ++i) {
    rate.admits(std::to_string(i), 0);
    rate.forget(std::to_string(i));
  }
  EXPECT_EQ(rate.peers(), 0U);
}

}  // namespace
}  // namespace remesh::server
