// Syncer: fdatasync of the logs in a thread of its own, at most once per
// period, so that a slow disk never keeps the coordinator from hearing its
// workers.
//
// Lines survive a kill -9 of the coordinator without any sync. A crash of its
// host loses at most one period of metrics.jsonl; the next coordinator restores
// what the newest checkpoint's manifest contains. Steps after that checkpoint
// are computed again if every host crashed.
//
// Threads: touch() from the owner's thread. The descriptors must stay open
// until the destructor, which syncs a last time.
#pragma once

#include <unistd.h>

#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "proto/base/background_loop.h"

namespace remesh::server {

class Syncer {
 public:
  Syncer(std::vector<int> fds, int period_ms) : fds_(std::move(fds)) {
    loop_.emplace(
        [this]() -> std::optional<std::chrono::milliseconds> {
          sync();
          return std::nullopt;
        },
        BackgroundLoop::Options{.min_gap =
                                    std::chrono::milliseconds(period_ms)});
  }
  ~Syncer() {
    loop_.reset();
    sync();
  }
  Syncer(const Syncer&) = delete;
  Syncer& operator=(const Syncer&) = delete;

  void touch() { loop_->wake(); }  // something was written

 private:
  // Nobody could act on a failure: the lines are in the page cache, and a
  // write that fails for good reports it itself.
  void sync() const {
    for (const int fd : fds_) (void)!fdatasync(fd);
  }

  const std::vector<int> fds_;
  std::optional<BackgroundLoop> loop_;
};

}  // namespace remesh::server
