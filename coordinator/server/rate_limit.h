// RateLimit: how many messages a second each peer may send: a token bucket for
// each. A value without I/O.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

namespace remesh::server {

// A worker reports at most 200 times a second (worker/agent/core), and sends a
// fence a few times.
inline constexpr double kMessagesPerS = 1000;
inline constexpr double kMessageBurst = 2000;

class RateLimit {
 public:
  // Whether the message of `peer` that arrives now is within its rate.
  bool admits(const std::string& peer, int64_t now_ms) {
    const auto [it, is_new] =
        buckets_.try_emplace(peer, Bucket{kMessageBurst, now_ms});
    Bucket& b = it->second;
    const double refill =
        static_cast<double>(now_ms - b.since_ms) * kMessagesPerS / 1000;
    b = {std::min(kMessageBurst, b.tokens + refill), now_ms};
    const bool admitted = b.tokens >= 1;
    if (admitted)
      b.tokens -= 1;
    else
      ++over_rate_;
    return admitted;
  }
  // The peer's connection has ended.
  void forget(const std::string& peer) { buckets_.erase(peer); }
  size_t peers() const { return buckets_.size(); }
  uint64_t over_rate() const { return over_rate_; }

  // Whether it is time to tell that so many messages were dropped: when there
  // are more, and at most once a minute.
  bool should_tell(uint64_t dropped, int64_t now_ms) {
    constexpr int64_t kEveryMs = 60'000;
    if (dropped == told_ || (told_ > 0 && now_ms - told_ms_ < kEveryMs))
      return false;
    told_ = dropped;
    told_ms_ = now_ms;
    return true;
  }

 private:
  struct Bucket {
    double tokens = 0;
    int64_t since_ms = 0;
  };
  std::map<std::string, Bucket> buckets_;
  uint64_t over_rate_ = 0;  // messages
  uint64_t told_ = 0;
  int64_t told_ms_ = 0;
};

}  // namespace remesh::server
