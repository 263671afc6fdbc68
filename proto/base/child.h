// Child processes.
//
// A child
//   - has its own process group;
//   - dies with the thread that started it (PR_SET_PDEATHSIG), so start it from
//     a thread that lives as long as the program;
//   - has all signals unblocked, and at their defaults but for `keep_ignored`;
//   - inherits no descriptors but 0, 1, 2 and `pass_fd`.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh {

struct ChildOptions {
  std::vector<std::string> argv;  // argv[0] without '/': searched in PATH
  // The complete environment, "KEY=value"; empty: that of this process.
  std::vector<std::string> env;
  std::string input = "/dev/null";
  std::string output;  // file for stdout and stderr, truncated
  int output_fd = -1;  // instead of `output`, if not -1
  int pass_fd = -1;    // becomes descriptor kChildFd
  // Of start_child(), until the program is executed; -1: unlimited.
  int patience_ms = 250;
  bool oom_victim = true;  // the preferred victim of the OOM killer
  // What this process ignores the child ignores, as under nohup, but for
  // SIGINT, SIGPIPE and SIGTERM.
  bool keep_ignored = false;
};
inline constexpr int kChildFd = 3;

struct Child {
  pid_t pid = 0;
  int pidfd = -1;  // readable when it has ended; -1: not supported
};

// The caller reaps the pid and closes pidfd. Fails if the program cannot be
// executed; the message names it. If that takes longer than the patience,
// because its file system hangs, the child counts as started.
Result<Child> start_child(const ChildOptions& options);

// Waits until the child ends, and kills it after `timeout_ms`. Closes pidfd.
// Returns its wait status; -1 if it was killed, even if it does not end then.
int wait_or_kill(const Child& child, int64_t timeout_ms);

// For execv(): ends with nullptr, and borrows the words.
std::vector<char*> exec_arguments(const std::vector<std::string>& words);

}  // namespace remesh
