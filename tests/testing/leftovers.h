// What workers and the libraries they use may leave behind on a host.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace remesh::testing {

// Which of these folders of workers and of their shared memory exist and belong
// to no running worker.
std::vector<std::string> worker_leftovers(
    const std::vector<std::string>& folders);
// The shared memory of the worker with that folder, as named by
// worker/agent/shell/scratch.h; its training state is in the subfolder state/.
std::string shared_folder(const std::string& folder);
// The TCP addresses that a process listens on: "127.0.0.1:1024", "[::1]:1024".
std::vector<std::string> listeners_of(pid_t pid);

}  // namespace remesh::testing
