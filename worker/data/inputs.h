// What a user names as input of `remesh data prepare`, as a list of files.
#pragma once

#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::data {

// Folders become the files in them and below, and patterns such as "a*.txt" the
// files that match, each in ascending order of the name; hidden files and, in
// folders, empty ones are left out. NotFound, naming the argument, if there is
// none.
Result<std::vector<std::string>> expand_inputs(
    const std::vector<std::string>& arguments);

}  // namespace remesh::data
