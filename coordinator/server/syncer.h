// Syncer: fdatasync of the logs on a thread of its own, at most once a period,
// so that a slow disk never keeps the coordinator from hearing its workers.
//
// What it is worth: lines survive a kill -9 of the coordinator without any
// sync. A crash of its host loses at most one period of metrics.jsonl; the
// next life fills in what the newest checkpoint's manifest still has, and the
// steps after that checkpoint are, when every host crashed, computed again.
//
// Threads: touch() from the owner's thread. The descriptors must stay open
// until the destructor, which syncs a last time.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace remesh::server {

class Syncer {
 public:
  Syncer(std::vector<int> fds, int period_ms);
  ~Syncer();
  Syncer(const Syncer&) = delete;
  Syncer& operator=(const Syncer&) = delete;

  void touch();  // something was written

 private:
  void work();

  std::vector<int> fds_;
  int period_ms_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool dirty_ = false;
  bool stopping_ = false;
  std::thread thread_;  // last: starts when the rest is there
};

}  // namespace remesh::server
