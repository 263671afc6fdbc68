// entries_of: the paths in a folder.
#pragma once

#include <filesystem>
#include <system_error>
#include <vector>

namespace remesh {

// In no order. Those that could be read, if an error ends the reading; so none
// of a folder that does not exist.
inline std::vector<std::filesystem::path> entries_of(
    const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> out;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end;
       !error && it != end; it.increment(error))
    out.push_back(it->path());
  return out;
}

}  // namespace remesh
