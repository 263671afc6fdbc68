// Queries of the coordinator's durable state. Pure.
#pragma once

#include <cstdint>
#include <string>

#include "proto/control.pb.h"

namespace remesh::core {

// The job has ended.
bool terminal(pb::Durable::Phase phase);

// "waiting", "running", ...
const char* phase_text(pb::Durable::Phase phase);

// Whether this incarnation of the worker is a participant of the newest
// generation.
bool participates(const pb::Durable& durable, const std::string& worker,
                  uint64_t incarnation);

// Whether the newest generation places ranks on the worker.
bool has_ranks(const pb::Durable& durable, const std::string& worker);

// Whether a command asked this incarnation of the worker to leave.
bool drains(const pb::Durable& durable, const std::string& worker,
            uint64_t incarnation);

// Whether this checkpoint failed to load before.
bool refuses(const pb::Durable& durable, const std::string& checkpoint);

}  // namespace remesh::core
