// SilenceWatch: when to say that nobody answers: soon, then ever more rarely.
// Pure.
#pragma once

#include <algorithm>
#include <cstdint>

namespace remesh::agent {

class SilenceWatch {
 public:
  static constexpr int64_t kFirstMs = 3000;
  static constexpr int64_t kMostMs = 600'000;

  // Whether to say so now. `heard_ms`: the last answer, or the start.
  bool due(int64_t heard_ms, int64_t now_ms) {
    if (heard_ms != heard_ms_) {
      heard_ms_ = heard_ms;
      pause_ms_ = kFirstMs;
      next_ms_ = heard_ms + kFirstMs;
    }
    if (now_ms < next_ms_) return false;
    pause_ms_ = std::min(2 * pause_ms_, kMostMs);
    next_ms_ = now_ms + pause_ms_;
    return true;
  }

 private:
  int64_t heard_ms_ = -1;
  int64_t pause_ms_ = 0;
  int64_t next_ms_ = 0;
};

}  // namespace remesh::agent
