// OrphanGuard: ends the process if its daemon hangs.
//
// The kernel kills a rank when its parent dies (PR_SET_PDEATHSIG), but not when
// the parent hangs. So the guard ends the process if there was no heartbeat of
// the daemon and no progress of this rank for 60 s. A rank that still trains
// continues.
//
// Threads: runs one thread, which the destructor ends.
#pragma once

#include <cstdint>
#include <functional>

#include "proto/base/background_loop.h"
#include "worker/board/board.h"

namespace remesh::train {

// Pure: decides from samples of (now, daemon's beat, progress).
class OrphanRule {
 public:
  // All in milliseconds of the monotonic clock.
  OrphanRule(int64_t now_ms, int64_t limit_ms)
      : limit_ms_(limit_ms), started_ms_(now_ms), moved_ms_(now_ms) {}
  // Returns whether the rank is an orphan. `beat_ms` is 0 before the first
  // heartbeat. After a pause between samples, in which nothing on the host may
  // have run, all have their time again.
  bool on_sample(int64_t now_ms, int64_t beat_ms, uint64_t progress);

 private:
  int64_t limit_ms_;
  int64_t started_ms_;
  int64_t moved_ms_;
  int64_t sampled_ms_ = 0;
  uint64_t progress_ = 0;
};

class OrphanGuard {
 public:
  // Calls `on_orphan`, which should not return, in the thread of the guard.
  // `board` must outlive the guard.
  OrphanGuard(const board::Board& board, std::function<void()> on_orphan);

 private:
  const board::Board& board_;
  const std::function<void()> on_orphan_;
  OrphanRule rule_;
  BackgroundLoop loop_;  // last: its thread uses the others
};

}  // namespace remesh::train
