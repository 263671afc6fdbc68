// The number of a run, which its job.toml has in a comment.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "proto/base/file_system.h"

namespace remesh::rundir {

// What the line begins with; 16 hexadecimal digits follow, and of what the
// coordinator wrote, the hash of the lines above.
inline constexpr std::string_view kRunIdMark = "# run ";

// The number of the run in directory `run`; 0 if it has none.
uint64_t run_id_of(FileSystem& fs, const std::string& run);

}  // namespace remesh::rundir
