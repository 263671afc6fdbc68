#include "coordinator/core/rate_limit.h"

#include <gtest/gtest.h>

#include "coordinator/server/message_rates.h"

namespace remesh::core {
namespace {

int admitted(RateLimit& rate, const std::string& peer, int messages,
             int64_t now_ms) {
  int n = 0;
  for (int i = 0; i < messages; ++i) n += rate.admits(peer, now_ms) ? 1 : 0;
  return n;
}

TEST(RateLimit, AFloodIsLimitedAndOthersAreNotAffected) {
  RateLimit rate(1000, 2000);
  EXPECT_EQ(admitted(rate, "flood", 100'000, 0), 2000);
  EXPECT_EQ(admitted(rate, "calm", 200, 0), 200);
  EXPECT_EQ(admitted(rate, "flood", 100'000, 100), 100);
  EXPECT_EQ(admitted(rate, "flood", 100'000, 60'000), 2000);
}

TEST(RateLimit, AClockThatIsSetBackDelaysNobody) {
  RateLimit rate(10, 20);
  EXPECT_EQ(admitted(rate, "a", 5, 3'600'000), 5);
  EXPECT_EQ(admitted(rate, "a", 100, 0), 15);
  EXPECT_EQ(admitted(rate, "a", 100, 1000), 10);
}

TEST(RateLimit, EndedConnectionsAreForgotten) {
  RateLimit rate(1000, 2000);
  for (int i = 0; i < 1000; ++i) {
    rate.admits(std::to_string(i), 0);
    rate.forget(std::to_string(i));
  }
  EXPECT_EQ(rate.senders(), 0U);
}

TEST(RateLimit, ManySendersTakeLittleMemoryOnceTheyAreIdle) {
  RateLimit rate(10, 20);
  for (int i = 0; i < 100'000; ++i)
    EXPECT_TRUE(rate.admits(std::to_string(i), i));
  EXPECT_LT(rate.senders(), 10'000U);
  EXPECT_EQ(admitted(rate, "99999", 100, 99'999), 19) << "not of the calm ones";
}

// Any number of connections of one key and host.
TEST(MessageRates, ConnectionsOfOneSourceShareARate) {
  server::MessageRates rates;
  const auto flood = [&](const std::string& source, int64_t now_ms) {
    int n = 0;
    for (int i = 0; i < 100'000; ++i)
      n += rates.admits({.peer = std::to_string(i % 100), .source = source},
                        now_ms)
               ? 1
               : 0;
    return n;
  };
  EXPECT_EQ(flood("key@a", 0), 8000);
  EXPECT_EQ(flood("key@a", 1000), 4000);
  EXPECT_EQ(rates.admits({.peer = "p", .source = "key@b"}, 1000), true);
  EXPECT_TRUE(rates.should_tell(0, 1000));
  EXPECT_FALSE(rates.should_tell(1, 2000)) << "within a minute";
  EXPECT_TRUE(rates.should_tell(1, 61'000));
  EXPECT_FALSE(rates.should_tell(1, 200'000)) << "no more since";
}

TEST(MessageRates, ASourceMaySendFewCommands) {
  server::MessageRates rates;
  wire::Received command{.peer = "p", .source = "key@a"};
  const wire::Received report = command;
  command.envelope.mutable_command();
  int n = 0;
  for (int i = 0; i < 1000; ++i) n += rates.serves(command, 0) ? 1 : 0;
  EXPECT_EQ(n, 100);
  EXPECT_TRUE(rates.serves(report, 0)) << "of the same source";
  EXPECT_TRUE(rates.serves(command, 20));
  EXPECT_FALSE(rates.serves(command, 20));
}

}  // namespace
}  // namespace remesh::core
