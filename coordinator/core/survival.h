// Whether the state that a generation leaves in memory is complete where the
// next one will have processes, so that it need not be saved first. Pure.
#pragma once

#include <set>
#include <string>

#include "checkpoint/memory/replica_placement.h"
#include "parallel/geometry/sharding.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::core {

// How the state of an assignment's ranks is sharded, except for the bounds of
// the pipeline stages; enough to compute replica groups.
geometry::Sharding sharding_of(const pb::Assignment& assignment);

// The same with the bounds. Fails if the model cannot be divided that way.
Result<geometry::Sharding> full_sharding_of(const pb::Assignment& assignment);

// Which ranks keep replicas of which.
memory::ReplicaPlacement replicas_of(const pb::Assignment& assignment);

// Whether the ranks of this generation keep replicas of each other at all.
bool makes_replicas(const pb::Assignment& assignment);

// Whether every state is on one of `hosts` when the ranks have stopped and made
// their replicas: the rank's own, that of another rank in its replica group, or
// a replica as placed by place_replicas(). Conservative for a state whose
// elements other states also hold.
bool survives_on(const pb::Assignment& assignment,
                 const std::set<std::string>& hosts);

// The hosts without which the state would not be complete.
std::set<std::string> needed_hosts(const pb::Assignment& assignment);

}  // namespace remesh::core
