// The training states in a worker's shared memory, as its daemon sees them:
// files that the ranks make and write (checkpoint/memory) and that outlive them
// and the daemon. It lists what they hold, keeps them young, and removes them.
//
// Young: its daemon touches a job's segments every minute. When none of them
// was touched for kStateKeptS, their worker is not coming back.
//
// A segment of a job is never removed for another job's sake while it is young.
// Stateless; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "worker/agent/core/agent.h"

namespace remesh::agent {

inline constexpr int64_t kStateKeptS = 600;

// What the job's segments in `folder` hold. REQUIRES: no rank lives.
// Removes what was left unfinished. One that does not open is among `damaged`.
InventoryTaken take_inventory(const std::string& folder, uint64_t job);
// In words, for the log: "2 states in 2 segments (192 MiB): steps 7, 8".
std::string describe_states(const std::string& folder, uint64_t job,
                            const InventoryTaken& inventory);

bool has_states(const std::string& folder);
// Bytes of the segments of other jobs.
uint64_t bytes_of_others(const std::string& folder, uint64_t job);
// Of any job. REQUIRES: no rank lives.
void remove_unfinished_states(const std::string& folder);
bool has_old_states(const std::string& folder);
// Touches the job's segments and removes the old ones of other jobs. Returns
// the number of segments removed.
int refresh_states(const std::string& folder, uint64_t job);

}  // namespace remesh::agent
