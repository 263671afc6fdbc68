// Which generation made the steps of a run, out of its metrics.jsonl: what the
// core asks for to tell states of a branch that was left (core/inventory.h).
#pragma once

#include <string>
#include <vector>

#include "coordinator/core/api.h"

namespace remesh::server {

// The first step of each generation in the file, in its order; none when there
// is no file. Lines that are none of metrics are passed over. Reads it once and
// parses one line a generation.
std::vector<core::FirstStep> first_steps(const std::string& metrics_path);

}  // namespace remesh::server
