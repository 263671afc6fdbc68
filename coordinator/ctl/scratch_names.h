// Names of the scratch folders of a run's local workers, which decide whose
// states in shared memory they find.
#pragma once

#include <set>
#include <string>
#include <vector>

namespace remesh::ctl {

// Used by a worker of that name in this run, and by no other on this host.
std::string scratch_name(const std::string& worker, const std::string& run);

// Of workers local-1 and up, in this order. Whoever has no part of the run's
// newest state, which is in `state_folders`, takes the folder of a worker that
// is gone and has one: it had another name, or the run another path. `root`:
// where the folders are.
std::vector<std::string> scratch_names(
    int workers, const std::string& run, const std::string& root,
    const std::set<std::string>& state_folders);

}  // namespace remesh::ctl
