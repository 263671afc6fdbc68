// Processes: start one under the worker's rules, and look at it in /proc.
//
// A child gets its own process group, dies with the thread that started it
// (PR_SET_PDEATHSIG: so start from a thread that lives as long as the daemon),
// has every signal unblocked and at its default, no descriptor but 0, 1, 2 and
// the one given, and is the first to go when memory runs out.
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
  std::vector<std::string> env;   // the whole environment, "KEY=value"
  std::string output;             // file for stdout and stderr, truncated
  int pass_fd = -1;               // becomes descriptor kChildFd
};
inline constexpr int kChildFd = 3;

struct Child {
  pid_t pid = 0;
  int pidfd = -1;  // readable when it has ended; -1: not supported here
};

// The caller reaps the pid and closes pidfd. Fails, naming the program, when
// it cannot be executed.
Result<Child> start_child(const ChildOptions& options);

// This program anew in this process, with its arguments: no thread and no open
// file but 0, 1, 2 is left. Returns only when that fails.
Status start_anew();

struct ProcStat {
  char state = '?';         // letter of proc(5)
  uint64_t start_time = 0;  // clock ticks since boot
  uint64_t rss_bytes = 0;
};
// Nothing when there is no such process.
std::optional<ProcStat> read_proc_stat(pid_t pid);
// Parses the text of /proc/PID/stat.
std::optional<ProcStat> parse_proc_stat(const std::string& text);

// A process that can be told from a later one with the same number.
struct ProcessId {
  pid_t pid = 0;
  uint64_t start_time = 0;
};
// SIGKILLs those that still live, with their groups, and waits until they are
// gone or `timeout_ms` has passed. They need not be our children. Returns the
// number that lived.
int kill_leftovers(const std::vector<ProcessId>& processes, int timeout_ms);

// Processors this process may use: affinity and cgroup quota.
int usable_cores();
// Memory of the host, or of the control group where that is less, in bytes; 0:
// not known.
uint64_t usable_memory();

}  // namespace remesh::agent
