// The runs that this user has started on this host, wherever their directories
// are: a list in $XDG_STATE_HOME/remesh/runs (~/.local/state/remesh/runs).
// Without it, everything works but finding runs that are not named.
#pragma once

#include <string>
#include <vector>

namespace remesh::rundir {

// Puts the run at the end of the list, as the one used last. Best effort.
void note_run(const std::string& run);
// The recorded runs that still exist, in the order of their last use, then
// those in the folder `runs` here that are not in the list. Absolute paths,
// without links.
std::vector<std::string> known_runs();
// The known runs with a live coordinator.
std::vector<std::string> live_runs();

}  // namespace remesh::rundir
