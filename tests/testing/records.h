// What metrics.jsonl and events.jsonl of a run must say after faults, whatever
// they were. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/testing/files.h"

namespace remesh::testing {

// Steps that a loss was allowed to take, because more hosts went at once than
// there were replicas for: finished in (from, to] of unix time.
struct Window {
  double from = 0;
  double to = 0;
};

struct Findings {
  std::vector<std::string> errors;
  int64_t steps = 0;
  int64_t generations = 0;
  int64_t from_memory = 0;      // generations that began from memory
  int64_t from_checkpoint = 0;  // ... and from a checkpoint
  int64_t lost_steps = 0;       // in all
  int64_t lost_outside = 0;     // ... outside the windows
  int64_t digests = 0;          // of states restored, compared
};

// Steps 1 to the last once each and in order, finished steps lost in `windows`
// only, the digest of each restored state that of its step.
Findings check_records(const std::vector<Json>& metrics,
                       const std::vector<Json>& events,
                       const std::vector<Window>& windows);

// The first step whose loss, as written, is another one; 0: none.
int64_t first_difference(const std::vector<std::string>& lines_a,
                         const std::vector<std::string>& lines_b);

}  // namespace remesh::testing
