// `remesh run --detach`: the run continues without the terminal.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/ctl/children.h"
#include "proto/base/status.h"

namespace remesh::ctl {

// Forks. The child has a session of its own, which no terminal ends, and its
// stdin is empty. Until it runs the parent passes interrupts on to it. To be
// called before any thread is started.
class Detached {
 public:
  static Result<Detached> start();

  pid_t child() const { return child_; }  // 0 in the child
  // In the parent: waits until the child has said that it runs, or has ended,
  // and returns the exit code of the parent. In the child: nothing.
  std::optional<int> exit_code_of_parent();
  // In the parent, after that: the file with the output of a child that runs,
  // or what the child has printed before it ended.
  const std::string& output_path() const { return output_path_; }
  std::vector<std::string> output() const { return output_.lines(); }
  // In the child, whose output is kept in memory until then: appends it to
  // `file`, now and from now on.
  void say_running(const std::string& file);

 private:
  Detached(pid_t child, int pipe, Output output)
      : child_(child), pipe_(pipe), output_(std::move(output)) {}

  pid_t child_;
  int pipe_;  // open until the process ends
  Output output_;
  std::string output_path_;
};

}  // namespace remesh::ctl
