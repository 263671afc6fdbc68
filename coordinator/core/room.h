// Room: whether the states of a generation fit into the shared memory of the
// hosts, as their workers report it (Report.state_room). Pure.
//
// A host needs room twice. While the generation restores its state, the states
// that it reads take one buffer each, and the ranks' own another one
// (Segments::take_beside in worker/train). Then every rank needs both of its
// buffers, and those of the replicas that it keeps. A state that is reused in
// place needs no room beside itself. So a mesh that fits, after one that
// fitted, also fits while it restores the other's states.
#pragma once

#include <map>
#include <string>

#include "coordinator/core/roster.h"
#include "parallel/geometry/param_table.h"
#include "proto/control.pb.h"

namespace remesh::core {

struct Shortage {
  uint64_t needed = 0;     // bytes of shared memory
  uint64_t available = 0;  // including what states of this job take
  friend bool operator==(const Shortage&, const Shortage&) = default;
};
using Shortages = std::map<std::string, Shortage>;  // by host

// The hosts without enough room for the assignment, which has its places,
// hosts, source and job. A host whose workers do not report their room has
// enough. `running`: the assignment of ranks that run now, whose workers do not
// say which states they hold; null: no rank runs.
Shortages find_shortages(const pb::Assignment& assignment,
                         const geometry::ParamTable& table,
                         const Roster& roster,
                         const pb::Assignment* running = nullptr);

// Makes what the ranks of `running` hold the source of the next assignment, as
// far as ranks of it can read it.
void start_from(const pb::Assignment& running,
                const geometry::ParamTable& table, pb::Assignment* next);

// Makes the assignment need less, a step at a time, until it fits: each state
// is read from one worker only, then no replicas are kept. `replicas`: whether
// replicas may be kept at all. Returns what is still short; *given_up is what
// was given up, for people.
Shortages fit_room(const geometry::ParamTable& table, const Roster& roster,
                   bool replicas, pb::Assignment* assignment,
                   std::string* given_up,
                   const pb::Assignment* running = nullptr);

bool same_hosts(const Shortages& a, const Shortages& b);
// "host a needs 12 MiB of shared memory for states and has 8 MiB; ..."; "" if
// there is none.
std::string to_text(const Shortages& shortages);

}  // namespace remesh::core
