// Scanner: looks for checkpoints in a thread of its own, so that a slow file
// system never keeps the coordinator from hearing its workers.
//
// A folder that cannot be listed yields no result and is tried again every
// second: "no checkpoint" would be a wrong answer, and training would start
// from scratch. take_note() says what is wrong.
//
// Threads: the public functions are for the owner's thread. fd() is readable
// when take() or take_note() has something.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "coordinator/core/coordinator.h"
#include "proto/base/background_loop.h"
#include "proto/base/file_system.h"
#include "proto/base/status.h"

namespace remesh::server {

// The checkpoints in `folder`, as the core takes them. The one of saved_step
// (0: none) is looked up by name if the listing lacks it. Those of another run
// than `run_id` (0: any) are invalid.
Result<core::CheckpointsScanned> scan_checkpoints(FileSystem& fs,
                                                  const std::string& folder,
                                                  int64_t saved_step = 0,
                                                  uint64_t run_id = 0);

class Scanner {
 public:
  Scanner(std::string folder, uint64_t run_id);
  ~Scanner();
  Scanner(const Scanner&) = delete;
  Scanner& operator=(const Scanner&) = delete;

  void request(int64_t saved_step);
  int fd() const { return event_fd_; }
  std::optional<core::CheckpointsScanned> take();
  // Why the scan in progress cannot finish; each text once.
  std::optional<std::string> take_note();

 private:
  std::optional<std::chrono::milliseconds> work();
  void wake_owner();

  std::string folder_;
  uint64_t run_id_;
  std::unique_ptr<FileSystem> fs_;
  int event_fd_ = -1;
  std::mutex mutex_;
  int64_t saved_step_ = 0;  // of the request
  std::optional<core::CheckpointsScanned> result_;
  std::optional<std::string> note_;
  std::string last_note_;
  std::optional<BackgroundLoop> loop_;
};

}  // namespace remesh::server
