// mix: writes a mixture (dataset.h) of data sets that exist.
#pragma once

#include <string>
#include <vector>

#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "proto/data/index.h"

namespace remesh::data {

struct MixOptions {
  // "DIR=WEIGHT"; each member is named after its folder.
  std::vector<std::string> members;
  std::string out_dir;  // created if missing
  bool overwrite = false;
};

// Returns the index. Fails, without changing out_dir, on an argument that is no
// folder and weight, on two members of one name, on members with different
// tokenizers, on one that has no text of the split that it is for, and if none
// has a weight above 0; with AlreadyExists if out_dir has something else.
Result<Index> mix(const MixOptions& options, FileSystem& fs);

}  // namespace remesh::data
