// Processes: starts child processes and reads their state from /proc.
//
// A child
//   - has its own process group;
//   - dies with the thread that started it (PR_SET_PDEATHSIG), so start it from
//     a thread that lives as long as the daemon;
//   - has all signals unblocked and at their defaults;
//   - inherits no descriptors but 0, 1, 2 and `pass_fd`;
//   - is the preferred victim of the OOM killer.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::agent {

struct ChildOptions {
  std::vector<std::string> argv;  // argv[0]: path of the program
  std::vector<std::string> env;   // the complete environment, "KEY=value"
  std::string output;             // file for stdout and stderr, truncated
  int output_fd = -1;             // instead of `output`, if not -1
  int pass_fd = -1;               // becomes descriptor kChildFd
};
inline constexpr int kChildFd = 3;

struct Child {
  pid_t pid = 0;
  int pidfd = -1;  // readable when it has ended; -1: not supported
};

// The caller reaps the pid and closes pidfd. Fails if the program cannot be
// executed; the message names it. If that takes long, because its file system
// hangs, the child counts as started.
Result<Child> start_child(const ChildOptions& options);

// The path of a program that was opened as `fd`, also if its file has been
// replaced since: ranks of two builds are never mixed, and a worker reports its
// own.
std::string path_of_program(const std::string& path, int fd);

// Replaces this process by a fresh execution of the same program with the same
// arguments. Only descriptors 0, 1 and 2 stay open. Returns only on failure.
Status restart_process();

struct ProcStat {
  char state = '?';         // letter of proc(5)
  uint64_t start_time = 0;  // clock ticks since boot
  uint64_t rss_bytes = 0;
};
// std::nullopt if there is no such process.
std::optional<ProcStat> read_proc_stat(pid_t pid);
// Parses the text of /proc/PID/stat.
std::optional<ProcStat> parse_proc_stat(const std::string& text);

// Identifies a process even after its pid was reused.
struct ProcessId {
  pid_t pid = 0;
  uint64_t start_time = 0;
};
// Sends SIGKILL to the processes that still live and to their groups, and waits
// until they are gone or `timeout_ms` has passed. They need not be children of
// this process. Returns the number that were alive.
int kill_leftovers(const std::vector<ProcessId>& processes, int timeout_ms);

}  // namespace remesh::agent
