// StopPause: when ranks are asked to stop again after they declined because
// they could not save, or after a change of mesh was put off because the states
// do not fit.
//
// A value without I/O.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "coordinator/core/room.h"

namespace remesh::core {

class StopPause {
 public:
  // Optional changes of mesh are not wanted before that time.
  int64_t until_ms() const { return until_ms_; }
  // Whether ranks that have committed that step may be asked for a stop that
  // they may decline: they forget one once they make a step without it.
  bool allows_stop(int64_t committed, int64_t now_ms) const {
    return now_ms >= no_stop_before_ms_ && committed >= no_stop_before_step_;
  }
  // Whether ranks declined a stop within the last second, or after further ones
  // in the generation within the last 2, 4, ... 30 s.
  bool was_declined(int64_t now_ms) const {
    return now_ms < declined_until_ms_;
  }
  // For which hosts a change was put off.
  const Shortages& short_of() const { return short_of_; }

  // The ranks, which have committed that step, declined a stop.
  void decline(int64_t committed, int64_t now_ms) {
    until_ms_ = now_ms + kOptionalMs;
    declined_until_ms_ =
        now_ms + std::min(kOptionalMs, kWithdrawnMs << std::min(declined_, 5));
    ++declined_;
    no_stop_before_ms_ = now_ms + kWithdrawnMs;
    // The step in progress may still count the request.
    no_stop_before_step_ = committed + 2;
  }
  // A change is put off. Whether other hosts are short than the last time.
  bool put_off(const Shortages& short_of, int64_t now_ms) {
    until_ms_ = now_ms + kOptionalMs;
    return !same_hosts(std::exchange(short_of_, short_of), short_of);
  }
  // No change is wanted, and none is put off.
  void end() { short_of_.clear(); }
  void on_unwritten(int64_t ms) { no_stop_before_ms_ += ms; }
  void begin_generation() {
    no_stop_before_step_ = -1;
    declined_ = 0;
  }

 private:
  static constexpr int64_t kOptionalMs = 30'000;
  static constexpr int64_t kWithdrawnMs = 1000;  // until the workers know it

  int64_t until_ms_ = 0;
  int64_t declined_until_ms_ = 0;
  int declined_ = 0;  // stops in this generation
  int64_t no_stop_before_ms_ = 0;
  int64_t no_stop_before_step_ = -1;
  Shortages short_of_;
};

}  // namespace remesh::core
