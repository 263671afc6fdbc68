// Invariants of metrics.jsonl and events.jsonl after any faults. Pure
// functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/testing/files.h"

namespace remesh::testing {

// Unix times (from, to] in which finished steps may be lost, because more hosts
// were lost at once than there were replicas.
struct Window {
  double from = 0;
  double to = 0;
};

struct Findings {
  std::vector<std::string> errors;
  int64_t steps = 0;
  int64_t generations = 0;
  int64_t from_memory = 0;      // generations restored from memory
  int64_t from_checkpoint = 0;  // ... and from a checkpoint
  int64_t lost_steps = 0;       // total
  int64_t lost_outside = 0;     // ... outside the windows
  int64_t digests = 0;          // digests of restored states that were compared
};

// Checks that steps 1 to the last occur once each and in order, that finished
// steps are lost only in `windows`, and that the digest of each restored state
// is that of its step.
Findings check_records(const std::vector<Json>& metrics,
                       const std::vector<Json>& events,
                       const std::vector<Window>& windows);

// The first step whose losses, as written, differ; 0 if there is none.
int64_t first_difference(const std::vector<std::string>& lines_a,
                         const std::vector<std::string>& lines_b);

}  // namespace remesh::testing
