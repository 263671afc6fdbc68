#include "worker/train/background.h"

#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <chrono>
#include <utility>

#include "proto/base/check.h"

namespace remesh::train {

// Of the processor (nice 15) and of the disk (the last of the best-effort
// levels, not idle, which might never be served). On Linux both are a thread's
// own, and those it starts inherit them. What cannot be had is done without.
void lower_priority_of_this_thread() {
#ifdef __linux__
  constexpr int kNice = 15;
  constexpr int kWhoProcess = 1, kBestEffort = 2, kLowest = 7;  // ioprio.h
  const auto id = static_cast<id_t>(::syscall(SYS_gettid));
  (void)::setpriority(PRIO_PROCESS, id, kNice);
  (void)::syscall(SYS_ioprio_set, kWhoProcess, static_cast<int>(id),
                  kBestEffort << 13 | kLowest);
#endif
}

Background::~Background() {
  {
    const std::lock_guard lock(mutex_);
    quit_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Background::start(std::function<Status()> job) {
  CHECK(!busy_);
  busy_ = true;
  {
    const std::lock_guard lock(mutex_);
    job_ = std::move(job);
  }
  prepare();
  changed_.notify_all();
}

void Background::prepare() {
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
}

std::optional<Status> Background::result() const {
  const std::lock_guard lock(mutex_);
  return result_;
}

Status Background::wait(const std::function<void()>& tick) {
  CHECK(busy_);
  std::unique_lock lock(mutex_);
  while (!result_) {
    changed_.wait_for(lock, std::chrono::milliseconds(10));
    lock.unlock();
    tick();
    lock.lock();
  }
  Status status = *std::exchange(result_, std::nullopt);
  busy_ = false;
  return status;
}

void Background::take() {
  const std::lock_guard lock(mutex_);
  CHECK(result_.has_value());
  result_.reset();
  busy_ = false;
}

void Background::loop() {
  if (priority_ == Priority::kLow) lower_priority_of_this_thread();
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return quit_ || job_; });
    if (!job_) return;
    const std::function<Status()> job = std::exchange(job_, nullptr);
    lock.unlock();
    Status status = job();
    lock.lock();
    result_ = std::move(status);
    changed_.notify_all();
  }
}

}  // namespace remesh::train
