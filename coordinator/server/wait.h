// Wait: how long something lasts, in portions for which somebody gets credit.
// What lasts less than kCreditedMs is none: everything takes some time.
//
// A value; it is given the time, in ms of one clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace remesh::server {

class Wait {
 public:
  static constexpr int64_t kCreditedMs = 300;

  void begin(int64_t now_ms) { since_ms_ = now_ms; }
  void end(int64_t now_ms) {
    owed_ms_ = take_ms(now_ms);
    since_ms_ = -1;
    taken_ms_ = 0;
  }
  // Ends; `again`: and begins.
  void restart(int64_t now_ms, bool again) {
    end(now_ms);
    if (again) begin(now_ms);
  }
  int64_t lasts_ms(int64_t now_ms) const {
    return since_ms_ < 0 ? 0 : std::max<int64_t>(0, now_ms - since_ms_);
  }
  // What was not taken yet.
  int64_t take_ms(int64_t now_ms) {
    const int64_t lasts = lasts_ms(now_ms);
    int64_t out = std::exchange(owed_ms_, 0);
    if (lasts < kCreditedMs) return out;
    out += lasts - taken_ms_;
    taken_ms_ = lasts;
    return out;
  }

 private:
  int64_t since_ms_ = -1;  // -1: does not last
  int64_t taken_ms_ = 0;   // of what lasts
  int64_t owed_ms_ = 0;    // of what has ended
};

}  // namespace remesh::server
