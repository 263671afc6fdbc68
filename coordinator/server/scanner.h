// Scanner: looks for checkpoints on a thread of its own, so that a slow file
// system never keeps the coordinator from hearing its workers.
//
// A folder that cannot be listed gives no answer but is tried again every
// second: "no checkpoint" would be a wrong answer, and training would begin
// anew. note() says what is in the way.
//
// Threads: the public functions are for the owner's thread. fd() is readable
// when take() has something.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "coordinator/core/coordinator.h"
#include "proto/base/file_system.h"
#include "proto/base/status.h"

namespace remesh::server {

// Scan results as the core takes them.
Result<core::CheckpointsScanned> scan_checkpoints(FileSystem& fs,
                                                  const std::string& folder);

class Scanner {
 public:
  explicit Scanner(std::string folder);
  ~Scanner();
  Scanner(const Scanner&) = delete;
  Scanner& operator=(const Scanner&) = delete;

  void request();
  int fd() const { return event_fd_; }
  std::optional<core::CheckpointsScanned> take();
  // Why the scan under way does not come to an end; once for each text.
  std::optional<std::string> take_note();

 private:
  void work();
  void wake_owner();

  std::string folder_;
  std::unique_ptr<FileSystem> fs_;
  int event_fd_ = -1;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool requested_ = false;
  bool stopping_ = false;
  std::optional<core::CheckpointsScanned> result_;
  std::optional<std::string> note_;
  std::string last_note_;
  std::thread thread_;  // last: starts when the rest is there
};

}  // namespace remesh::server
