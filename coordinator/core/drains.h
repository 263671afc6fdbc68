// The workers that commands drain, as the journal keeps them. Pure.
#pragma once

#include <cstdint>
#include <string>

#include "coordinator/core/roster.h"
#include "proto/control.pb.h"

namespace remesh::core {

// A command asks this incarnation of the worker to leave, and later ones until
// it was told. Forgets those that were told and are gone.
void begin_drain(const std::string& worker, uint64_t incarnation,
                 const Roster& roster, pb::Drains* drains);
// Whether a command asked this incarnation of the worker to leave, or one
// before it that had not been told.
bool drains(const pb::Drains& drains, const std::string& worker,
            uint64_t incarnation);
// This incarnation was told to leave and is gone: a later one is not drained.
// Returns whether it was drained.
bool finish_drain(const std::string& worker, uint64_t incarnation,
                  pb::Drains* drains);

}  // namespace remesh::core
