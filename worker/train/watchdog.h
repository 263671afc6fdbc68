// OrphanGuard: ends the process when its daemon is gone.
//
// The kernel kills a rank when its parent dies (PR_SET_PDEATHSIG), but not when
// the parent is there and stuck for good. So: no beat of the daemon for 60 s
// while this rank has made no progress for 60 s either ends it. A rank that
// still trains goes on.
//
// Threads: one of its own; the destructor ends it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

#include "worker/board/board.h"

namespace remesh::train {

// Pure: decides from samples of (now, daemon's beat, progress).
class OrphanRule {
 public:
  // All in milliseconds of the monotonic clock.
  OrphanRule(int64_t now_ms, int64_t limit_ms)
      : limit_ms_(limit_ms), started_ms_(now_ms), moved_ms_(now_ms) {}
  // True: an orphan. A beat of 0 means none so far.
  bool on_sample(int64_t now_ms, int64_t beat_ms, uint64_t progress);

 private:
  int64_t limit_ms_;
  int64_t started_ms_;
  int64_t moved_ms_;
  uint64_t progress_ = 0;
};

class OrphanGuard {
 public:
  // `on_orphan` runs in the guard's thread; it is expected not to return.
  // `board` must outlive the guard.
  OrphanGuard(const board::Board& board, std::function<void()> on_orphan);
  ~OrphanGuard();
  OrphanGuard(const OrphanGuard&) = delete;
  OrphanGuard& operator=(const OrphanGuard&) = delete;

 private:
  void loop();

  const board::Board& board_;
  std::function<void()> on_orphan_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool quit_ = false;
  std::thread thread_;
};

}  // namespace remesh::train
