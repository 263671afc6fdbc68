#include "coordinator/server/syncer.h"

#include <unistd.h>

#include <chrono>
#include <utility>

namespace remesh::server {

Syncer::Syncer(std::vector<int> fds, int period_ms)
    : fds_(std::move(fds)),
      period_ms_(period_ms),
      thread_([this] { work(); }) {}

Syncer::~Syncer() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Syncer::touch() {
  {
    const std::lock_guard lock(mutex_);
    if (dirty_) return;
    dirty_ = true;
  }
  wake_.notify_all();
}

void Syncer::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return dirty_ || stopping_; });
    if (!dirty_) return;
    dirty_ = false;
    lock.unlock();
    // A failing sync has nobody to act on it: the lines are in the page cache,
    // and the next write that fails for good is reported by write itself.
    for (const int fd : fds_) (void)!fdatasync(fd);
    lock.lock();
    wake_.wait_for(lock, std::chrono::milliseconds(period_ms_),
                   [this] { return stopping_; });
  }
}

}  // namespace remesh::server
