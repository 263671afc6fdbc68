// How the daemon's thread divides its time. Values; they are given the time.
#pragma once

#include <cstdint>

namespace remesh::server {

// The messages of one turn of the loop: in a flood signals and ticks are heard.
class ReceiveBudget {
 public:
  explicit ReceiveBudget(int64_t now_ms) : began_ms_(now_ms) {}
  // To be asked before each message.
  bool is_spent(int64_t now_ms) {
    return messages_++ >= kMessages || now_ms - began_ms_ >= kMs;
  }

 private:
  static constexpr int kMessages = 256;
  static constexpr int64_t kMs = 5;
  int64_t began_ms_;
  int messages_ = 0;
};

// When the core reconciles the cluster as a whole, which takes long if it is
// large: the next time comes after kPause times as long, so that most of the
// time is left to messages.
class ReconcilePacer {
 public:
  static constexpr int64_t kPause = 4;
  bool is_due(int64_t now_ns) {
    began_ns_ = now_ns;
    return now_ns >= next_ns_;
  }
  void done(int64_t now_ns) {
    next_ns_ = now_ns + kPause * (now_ns - began_ns_);
  }

 private:
  int64_t began_ns_ = 0;
  int64_t next_ns_ = 0;
};

}  // namespace remesh::server
