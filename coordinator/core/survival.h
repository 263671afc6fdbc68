// Survival: whether the state that a generation leaves in memory is whole where
// the next one will have processes, so that nobody need save it first. Pure.
#pragma once

#include <set>
#include <string>

#include "parallel/geometry/sharding.h"
#include "proto/control.pb.h"

namespace remesh::core {

// How the state of an assignment's ranks is cut, but for the bounds of its
// stages: enough for content classes.
geometry::Sharding sharding_of(const pb::Assignment& assignment);

// Whether ranks of this generation keep replicas of others at all.
bool makes_replicas(const pb::Assignment& assignment);

// Whether every state lies on one of `hosts` when the ranks have stopped and
// made their replicas: its own rank's, that of a rank which holds the same
// (content class), or a replica as place_replicas() puts it. Exact but for a
// state that holds nothing which others do not.
bool survives_on(const pb::Assignment& assignment,
                 const std::set<std::string>& hosts);

}  // namespace remesh::core
