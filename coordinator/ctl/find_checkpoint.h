// Where checkpoints are, for verbs that are given a run, a folder of
// checkpoints, or one of them.
#pragma once

#include <cstdint>
#include <string>

#include "proto/base/file_system.h"
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

// The Hugging Face folder of the model that the run of `checkpoint` continues,
// which one_checkpoint() has found at `target`. "": none, or it is not known,
// cannot be read any more or is of another model now.
std::string model_continued(FileSystem& fs, const std::string& target,
                            const std::string& checkpoint);

}  // namespace remesh::ctl
