#include "proto/base/background_loop.h"

#include <utility>

namespace remesh {

BackgroundLoop::BackgroundLoop(Work work, Options options)
    : work_(std::move(work)),
      options_(options),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

void BackgroundLoop::wake() {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  changed_.notify_all();
}

void BackgroundLoop::run(const std::stop_token& stop) {
  std::optional<Milliseconds> delay = options_.first;
  std::unique_lock lock(mutex_);
  while (true) {
    const auto woken = [this] { return woken_; };
    if (delay)
      changed_.wait_for(lock, stop, *delay, woken);
    else
      changed_.wait(lock, stop, woken);
    if (stop.stop_requested()) return;
    woken_ = false;
    lock.unlock();
    delay = work_();
    lock.lock();
    changed_.wait_for(lock, stop, options_.min_gap, [] { return false; });
  }
}

}  // namespace remesh
