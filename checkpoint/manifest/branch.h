// Which history a folder's checkpoints are of, when two generations write there
// at once: ranks that are cut off save on, and do not know that the job went on
// without them, from an older step.
//
// A generation says that it goes on in a folder (claim); who finds a newer
// claim than its own publishes and removes nothing there any more. What was
// saved before that, beyond the step that the newer one began with, is of
// another branch: it neither counts as saved nor keeps others from being kept.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "proto/base/file_system.h"

namespace remesh::manifest {

// The state that a generation began with: step, and the generation that made
// (or saved) it.
struct Origin {
  int64_t step = 0;
  int64_t generation = 0;
};

// Whether a checkpoint of `step` that `saver` wrote is in the past of
// `generation`, or its own. Without an origin all older ones are.
bool of_branch(const std::optional<Origin>& origin, int64_t generation,
               int64_t step, int64_t saver);

// Says so. Makes the folder; older claims are removed. Durable only against
// the death of processes.
Status claim(FileSystem& fs, const std::string& folder, int64_t generation);
// The newest generation that did; 0: none.
Result<int64_t> claimed(FileSystem& fs, const std::string& folder);
// Cancelled when a newer one than `generation` did.
Status check_claim(FileSystem& fs, const std::string& folder,
                   int64_t generation);

}  // namespace remesh::manifest
