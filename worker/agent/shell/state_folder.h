// The folder of training states in a worker's shared memory, as its daemon uses
// it. The ranks create and write the segments (checkpoint/memory), which
// outlive them and the daemon. The daemon lists, touches and removes them.
//
// The daemon touches a job's segments every minute. Segments that were not
// touched for kStateKeptS are old: their worker is not expected to return. A
// segment that is not old is never removed to make room for another job. One
// that no daemon touched for kStateUnclaimedS, not counting time during which
// the machine slept, and that no process has open for writing is unclaimed.
//
// Stateless; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/memory/state_info.h"
#include "worker/agent/core/agent.h"

namespace remesh::agent {

using memory::kStateKeptS;

// Lists the states in the job's segments in `folder` and removes unfinished
// segments. Segments that do not open are in `damaged`. REQUIRES: no rank
// lives.
InventoryTaken take_inventory(const std::string& folder, uint64_t job);
// For the log: "2 states in 2 segments (192 MiB): steps 7, 8".
std::string describe_states(const std::string& folder, uint64_t job,
                            const InventoryTaken& inventory);

bool has_states(const std::string& folder);
// Bytes of the segments of other jobs.
uint64_t bytes_of_others(const std::string& folder, uint64_t job);
bool has_old_states(const std::string& folder);
// Touches the job's segments and removes the old ones of other jobs. Returns
// the number of segments removed.
int refresh_states(const std::string& folder, uint64_t job);
// Removes the segments of all jobs that were not used for `limit_s`, not
// counting time during which the machine slept; returns their number. One that
// a process has open for writing stays. limit_s < 0: whatever their age.
int remove_unclaimed_states(const std::string& folder, int64_t limit_s);
// Seconds since any of them was used.
int64_t age_of_states(const std::string& folder);

}  // namespace remesh::agent
