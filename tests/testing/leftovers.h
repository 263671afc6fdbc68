// What workers and the libraries below them may leave behind on a host.
#pragma once

#include <string>
#include <vector>

namespace remesh::testing {

// Entries of /tmp and /dev/shm that MPI and PMIx make when they are not told
// another place; sorted.
std::vector<std::string> temporary_entries();
// Those that were not there before.
std::vector<std::string> temporary_leftovers(
    const std::vector<std::string>& before);
// Folders and shared memory of the workers of these names below `scratch` and
// below the default scratch folder that no living worker holds.
std::vector<std::string> worker_leftovers(
    const std::string& scratch, const std::vector<std::string>& names);
// The shared memory of the worker of that name, as worker/agent/shell/scratch.h
// names it; its training state lies below in state/.
std::string shared_folder(const std::string& scratch, const std::string& name);
// Whether any socket of this network namespace listens on the TCP port.
bool listens(int port);

}  // namespace remesh::testing
