// The coordinator's durable state: what a life of it begins with, and queries.
// Pure.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "coordinator/core/api.h"
#include "proto/control.pb.h"

namespace remesh::core {

// What this life of the coordinator begins with: what the journal says, under a
// new epoch, and for a resumed job without its end and its failures. Its
// generation is at least the newest one in the metrics and the events, which
// the journal may not know if it was lost or put back from a backup. The end
// that such a journal has is of an earlier life: the job was resumed since, and
// may run.
pb::Durable restore(const Options& options, bool keeps_state);
// The newest generation is not the one that the journal has the plan of, so it
// is not known who takes part in it, nor which ranks must commit a step. It
// ends, and the next one starts from what the workers and checkpoints have.
// Returns false, and changes nothing, if the plan is known or the job is
// WAITING. REQUIRES: the job has not ended.
bool leave_unknown_generation(pb::Durable* durable);

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

// The hosts of these workers.
std::set<std::string> hosts_with_ranks(const pb::Durable& durable);

// Sets Assignment.num_ranks.
void count_ranks(pb::Assignment* assignment);

// Whether the source has a part in the worker's memory.
bool is_in_memory_of(const pb::Source& source, const std::string& worker);

}  // namespace remesh::core
