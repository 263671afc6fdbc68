// What workers and the libraries they use may leave behind on a host.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace remesh::testing {

// Entries that MPI and PMIx create by default in /tmp and /dev/shm; sorted.
std::vector<std::string> temporary_entries();
// Those that are not in `before`.
std::vector<std::string> temporary_leftovers(
    const std::vector<std::string>& before);
// Folders and shared memory of the named workers, in `scratch` and in the
// default scratch folder, that no running worker owns.
std::vector<std::string> worker_leftovers(
    const std::string& scratch, const std::vector<std::string>& names);
// The shared-memory folder of a worker, as named by
// worker/agent/shell/scratch.h; its training state is in the subfolder state/.
std::string shared_folder(const std::string& scratch, const std::string& name);
// Whether any socket of this network namespace listens on the TCP port.
bool listens(int port);
// The TCP addresses that a process listens on: "127.0.0.1:1024", "[::1]:1024".
std::vector<std::string> listeners_of(pid_t pid);

}  // namespace remesh::testing
