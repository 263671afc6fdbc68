// Scanner: looks for checkpoints in a thread of its own, so that a slow file
// system never keeps the coordinator from hearing its workers.
//
// A folder that cannot be listed yields no result and is tried again every
// second: "no checkpoint" would be a wrong answer, and training would start
// from scratch. take_error() says what is wrong.
//
// Threads: the public functions are for the owner's thread. fd() is readable
// when take() or take_error() has something.
#pragma once

#include <memory>
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
  Scanner(std::string folder, uint64_t run_id,
          std::unique_ptr<FileSystem> fs = posix_file_system());
  // Does not wait for long for a file system that does not answer: the thread
  // then ends after this object, or with the process.
  ~Scanner();
  Scanner(const Scanner&) = delete;
  Scanner& operator=(const Scanner&) = delete;

  void request(int64_t saved_step);
  int fd() const;
  std::optional<core::CheckpointsScanned> take();
  // An event that says why the scan in progress cannot finish, where it did not
  // fail in the same way before.
  std::optional<pb::EventRecord> take_error();
  // Says that the scan takes long.
  std::optional<pb::JobStatus::Problem> problem() const;

 private:
  struct Shared;
  const std::shared_ptr<Shared> shared_;  // with the thread
  std::unique_ptr<BackgroundLoop> loop_;
};

}  // namespace remesh::server
