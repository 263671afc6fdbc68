// What a phase waits for live members to do. Pure.
#pragma once

#include <string>

#include "coordinator/core/roster.h"
#include "proto/control.pb.h"

namespace remesh::core {

// It can be given no rank, so it has nothing to prepare.
bool offers_nothing(const pb::Report& report);
// Fenced, with no rank alive, and able to say what it holds.
bool is_free(const pb::Report& report, const pb::Durable& durable);
// What the phase waits for the live member to do: "end its ranks"; "" if
// nothing.
std::string awaited(const pb::Durable& durable, const std::string& name,
                    const Roster::Member& member);

}  // namespace remesh::core
