// RateLimit: how many messages a second each of several senders may send: a
// token bucket for each. A value without I/O.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace remesh::core {

class RateLimit {
 public:
  // A sender may send `burst` messages at once, and `per_s` a second.
  RateLimit(double per_s, double burst) : per_s_(per_s), burst_(burst) {}

  // Whether the message of `sender` that arrives now is within its rate.
  bool admits(const std::string& sender, int64_t now_ms) {
    if (buckets_.size() >= forget_at_) forget_idle(now_ms);
    const auto [it, is_new] =
        buckets_.try_emplace(sender, Bucket{burst_, now_ms});
    Bucket& b = it->second;
    b = {tokens(b, now_ms), now_ms};
    const bool admitted = b.tokens >= 1;
    if (admitted)
      b.tokens -= 1;
    else
      ++over_rate_;
    return admitted;
  }
  // The sender's connection has ended.
  void forget(const std::string& sender) { buckets_.erase(sender); }
  size_t senders() const { return buckets_.size(); }
  uint64_t over_rate() const { return over_rate_; }

 private:
  struct Bucket {
    double tokens = 0;
    int64_t since_ms = 0;
  };
  double tokens(const Bucket& b, int64_t now_ms) const {
    // The clock may have been set back.
    const auto ms =
        static_cast<double>(std::max<int64_t>(0, now_ms - b.since_ms));
    return std::min(burst_, b.tokens + ms * per_s_ / 1000);
  }
  // A full bucket is like none.
  void forget_idle(int64_t now_ms) {
    std::erase_if(buckets_, [&](const auto& b) {
      return tokens(b.second, now_ms) >= burst_;
    });
    forget_at_ = std::max(kFew, 2 * buckets_.size());
  }

  static constexpr size_t kFew = 4096;
  double per_s_;
  double burst_;
  std::map<std::string, Bucket> buckets_;
  size_t forget_at_ = kFew;
  uint64_t over_rate_ = 0;  // messages
};

}  // namespace remesh::core
