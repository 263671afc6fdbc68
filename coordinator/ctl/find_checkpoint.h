// Where checkpoints are, for verbs that are given a run, a folder of
// checkpoints, or one of them.
#pragma once

#include <cstdint>
#include <string>

#include "proto/base/status.h"

namespace remesh::ctl {

bool is_checkpoint(const std::string& path);
// The folder of a run's checkpoints.
Result<std::string> checkpoint_folder(const std::string& run);
// The same, or the path itself if it has checkpoints.
Result<std::string> checkpoint_folder_of(const std::string& target);
// The checkpoint `target`, or that of this step (-1: the newest valid one) of a
// run or a folder. InvalidArgument for a step of one checkpoint.
Result<std::string> one_checkpoint(const std::string& target, int64_t step);

}  // namespace remesh::ctl
