#include "coordinator/server/syncer.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace remesh::server {
namespace {

// Writes the bytes of a range over themselves. After a failed sync the kernel
// may take pages for clean that never reached the disk, and the next sync would
// succeed without them.
Status write_again(int fd, uint64_t begin, uint64_t end) {
  char bytes[1 << 16];
  while (begin < end) {
    const ssize_t n = pread(fd, bytes, std::min(sizeof(bytes), end - begin),
                            static_cast<off_t>(begin));
    if (n <= 0 || pwrite(fd, bytes, static_cast<size_t>(n),
                         static_cast<off_t>(begin)) != n)
      return errno_error("metrics.jsonl: write again", n == 0 ? EIO : errno);
    begin += static_cast<uint64_t>(n);
  }
  return ok_status();
}

}  // namespace

Syncer::Syncer(int metrics_fd, int events_fd, int period_ms, Sync sync)
    : metrics_fd_(metrics_fd),
      events_fd_(events_fd),
      sync_(sync ? std::move(sync) : Sync(::fdatasync)) {
  loop_.emplace(
      [this, period_ms]() -> std::optional<std::chrono::milliseconds> {
        this->sync();
        const std::lock_guard lock(mutex_);
        if (failure_.ok()) return std::nullopt;
        return std::chrono::milliseconds(period_ms);
      },
      BackgroundLoop::Options{.min_gap = std::chrono::milliseconds(period_ms)});
}

Syncer::~Syncer() {
  loop_.reset();
  sync();
}

void Syncer::wrote(int64_t step, uint64_t size) {
  {
    const std::lock_guard lock(mutex_);
    written_step_ = step;
    written_size_ = size;
  }
  touch();
}

int64_t Syncer::synced_step() const {
  const std::lock_guard lock(mutex_);
  return synced_step_;
}

std::optional<std::string> Syncer::problem() const {
  const std::lock_guard lock(mutex_);
  if (failure_.ok()) return std::nullopt;
  return failure_.message();
}

Status Syncer::sync_metrics() {
  const std::lock_guard one_at_a_time(syncing_);
  int64_t step = 0;
  uint64_t size = 0;
  {
    const std::lock_guard lock(mutex_);
    step = written_step_;
    size = written_size_;
  }
  if (rewrite_) RETURN_IF_ERROR(write_again(metrics_fd_, synced_size_, size));
  rewrite_ = sync_(metrics_fd_) != 0;
  if (rewrite_) return errno_error("metrics.jsonl: sync", errno);
  synced_size_ = size;
  const std::lock_guard lock(mutex_);
  synced_step_ = step;
  return ok_status();
}

void Syncer::sync() {
  Status status = sync_metrics();
  if (sync_(events_fd_) != 0 && status.ok())
    status = errno_error("events.jsonl: sync", errno);
  const std::lock_guard lock(mutex_);
  failure_ = status;
}

}  // namespace remesh::server
