// Syncer: fdatasync of the logs in a thread of its own, at most once per
// period, so that a slow disk never keeps the coordinator from hearing its
// workers.
//
// Lines survive a kill -9 of the coordinator without any sync. A crash of its
// host loses at most what was not synced, and workers keep the metrics of steps
// until those are.
//
// Threads: any. The descriptors must stay open until the destructor, which
// syncs a last time.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "proto/base/background_loop.h"
#include "proto/base/status.h"

namespace remesh::server {

class Syncer {
 public:
  // 0, or -1 with errno: fdatasync, unless a test gives another.
  using Sync = std::function<int(int fd)>;

  Syncer(int metrics_fd, int events_fd, int period_ms, Sync sync = {});
  ~Syncer();
  Syncer(const Syncer&) = delete;
  Syncer& operator=(const Syncer&) = delete;

  // Something was written.
  void touch() { loop_->wake(); }
  // The lines of metrics up to this step are written and end at `size`.
  void wrote(int64_t step, uint64_t size);
  // Makes what is written of metrics durable. Waits for the disk.
  Status sync_metrics();
  // The steps up to this one are durable; 0: none yet.
  int64_t synced_step() const;
  // Why the newest sync failed: "metrics.jsonl: sync: Input/output error".
  std::optional<std::string> problem() const;

 private:
  void sync();

  const int metrics_fd_, events_fd_;
  const Sync sync_;
  std::mutex syncing_;  // held while the disk works
  uint64_t synced_size_ = 0;
  bool rewrite_ = false;  // a sync has failed
  mutable std::mutex mutex_;
  int64_t written_step_ = 0, synced_step_ = 0;
  uint64_t written_size_ = 0;
  Status failure_;
  std::optional<BackgroundLoop> loop_;
};

}  // namespace remesh::server
