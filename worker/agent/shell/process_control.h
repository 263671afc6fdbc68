// Restarts this process, and kills others.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::agent {

// The path of a program that was opened as `fd`, also if its file has been
// replaced since: ranks of two builds are never mixed, and a worker reports its
// own.
std::string path_of_program(const std::string& path, int fd);

// Replaces this process by a fresh execution of the same program with the same
// arguments. Only descriptors 0, 1 and 2 stay open. Returns only on failure.
Status restart_process();

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
