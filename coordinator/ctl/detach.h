// `remesh run --detach`: the run continues without the terminal.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "proto/base/status.h"

namespace remesh::ctl {

// Forks. The child has a session of its own, which no terminal ends; its stdout
// and stderr go to the end of `output`, and its stdin is empty. To be called
// before any thread is started.
class Detached {
 public:
  static Result<Detached> start(const std::string& output);

  pid_t child() const { return child_; }  // 0 in the child
  // In the parent: waits until the child has said that it runs, or has ended,
  // and returns the exit code of the parent. In the child: nothing.
  std::optional<int> exit_code_of_parent() const;
  // In the child.
  void say_running() const;

 private:
  Detached(pid_t child, int pipe) : child_(child), pipe_(pipe) {}

  pid_t child_;
  int pipe_;  // open until the process ends
};

}  // namespace remesh::ctl
