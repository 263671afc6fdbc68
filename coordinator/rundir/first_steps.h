// The generation that made each step of a run, from its metrics.jsonl. The core
// uses it to recognise states of abandoned branches (core/state_choice.h).
#pragma once

#include <string>
#include <vector>

#include "coordinator/core/api.h"

namespace remesh::rundir {

// The first step of each generation in the file, in file order; empty if there
// is no file. Skips lines that are not metrics. Reads the file once and parses
// one line per generation, and those that metrics_line() has not written.
// *damaged: the number of lines that are cut or something else.
std::vector<core::FirstStep> first_steps(const std::string& metrics_path,
                                         int64_t* damaged = nullptr);

}  // namespace remesh::rundir
