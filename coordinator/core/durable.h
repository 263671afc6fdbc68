// Queries of the coordinator's durable state. Pure.
#pragma once

#include <cstdint>
#include <string>

#include "proto/control.pb.h"

namespace remesh::core {

// The job has ended.
bool terminal(pb::Durable::Phase phase);

// "waiting", "running", ...
std::string phase_text(pb::Durable::Phase phase);

// The queries by name take the logarithm of the number of workers: participants
// and Assignment.workers are in the order of their names.

// Whether this incarnation of the worker is a participant of the newest
// generation.
bool participates(const pb::Durable& durable, const std::string& worker,
                  uint64_t incarnation);

// Whether the worker is one of Assignment.workers.
bool is_assigned(const pb::Assignment& assignment, const std::string& worker);

// Whether the newest generation places ranks on the worker.
bool has_ranks(const pb::Durable& durable, const std::string& worker);

// Sets Assignment.num_ranks.
void count_ranks(pb::Assignment* assignment);

// Whether a command asked this incarnation of the worker to leave.
bool drains(const pb::Durable& durable, const std::string& worker,
            uint64_t incarnation);

// Whether this checkpoint failed to load before.
bool refuses(const pb::Refusals& refusals, const std::string& checkpoint);

}  // namespace remesh::core
