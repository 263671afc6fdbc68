// What a user names as input of `remesh data prepare`, as a list of files.
#pragma once

#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::data {

// Folders become the files in them and below, and patterns such as "a*.txt" the
// files that match, each in ascending order of the name; hidden files and, in
// folders, empty ones are left out. Links are followed, but for one that leads
// back to a folder that it is in. NotFound, naming the argument if it has no
// file, or a link in a folder whose file is missing.
Result<std::vector<std::string>> expand_inputs(
    const std::vector<std::string>& arguments);

}  // namespace remesh::data
