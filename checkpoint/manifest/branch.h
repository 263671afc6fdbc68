// Branches: which history the checkpoints of a folder belong to when two
// generations write there at once. Ranks that are cut off keep saving and do
// not know that the job resumed without them from an older step.
//
// A generation claims a folder; a generation that finds a newer claim than its
// own no longer publishes or removes anything there. Checkpoints saved before
// that, beyond the step that the newer generation resumed from, belong to
// another branch: they neither count as saved nor in retention.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "proto/base/file_system.h"

namespace remesh::manifest {

// The state that a generation started from: its step, and the generation that
// made (or saved) it.
struct Origin {
  int64_t step = 0;
  int64_t generation = 0;
};

// Whether a checkpoint of `step` that generation `saver` wrote is in the past
// of `generation`, or its own. Without an origin all older ones are. A rank
// knows no other origin than its own, so a checkpoint before that step counts
// even if an earlier generation abandoned it; core::abandoned_by()
// (coordinator/core/state_choice.h) knows the whole history.
bool of_branch(const std::optional<Origin>& origin, int64_t generation,
               int64_t step, int64_t saver);

// Claims the folder for `generation`. Makes the folder and removes older
// claims. Not synced: durable against the death of processes only.
Status claim(FileSystem& fs, const std::string& folder, int64_t generation);
// The newest generation that claimed it; 0 if none.
Result<int64_t> claimed(FileSystem& fs, const std::string& folder);
// Cancelled when a generation newer than `generation` claimed it.
Status check_claim(FileSystem& fs, const std::string& folder,
                   int64_t generation);

}  // namespace remesh::manifest
