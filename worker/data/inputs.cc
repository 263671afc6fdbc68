#include "worker/data/inputs.h"

#include <glob.h>

#include <algorithm>
#include <filesystem>

namespace remesh::data {
namespace {

namespace files = std::filesystem;

bool is_hidden(const files::path& path) {
  return path.filename().string().starts_with('.');
}

// Whether a link in a folder, so many levels below the first one, leads back to
// one of those that it is in.
bool leads_back(const files::path& link, int levels) {
  std::error_code unknown;
  files::path folder = link.parent_path();
  for (; levels >= 0; --levels, folder = folder.parent_path())
    if (files::equivalent(link, folder, unknown)) return true;
  return false;
}

// Appends the files in the folder and below.
Status add_folder(const std::string& folder, std::vector<std::string>* out) {
  std::error_code error;
  const auto size = static_cast<std::ptrdiff_t>(out->size());
  auto at = files::recursive_directory_iterator(
      folder, files::directory_options::follow_directory_symlink, error);
  for (; !error && at != files::recursive_directory_iterator();
       at.increment(error)) {
    std::error_code unknown;
    const bool link = at->is_symlink(unknown);
    if (is_hidden(at->path()) || (link && leads_back(at->path(), at.depth()))) {
      if (at->is_directory(unknown)) at.disable_recursion_pending();
    } else if (link && !at->exists(unknown)) {
      return not_found(at->path().string() + ": a link to a missing file");
    } else if (at->is_regular_file(unknown) && at->file_size(unknown) > 0) {
      out->push_back(at->path().string());
    }
  }
  if (error) return io_error(folder + ": " + error.message());
  std::sort(out->begin() + size, out->end());
  return ok_status();
}

std::vector<std::string> matches(const std::string& pattern) {
  glob_t found = {};
  std::vector<std::string> out;
  if (::glob(pattern.c_str(), 0, nullptr, &found) == 0)
    out.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  return out;
}

}  // namespace

Result<std::vector<std::string>> expand_inputs(
    const std::vector<std::string>& arguments) {
  std::vector<std::string> out;
  for (const std::string& argument : arguments) {
    std::error_code error;
    std::vector<std::string> names = {argument};
    if (!files::exists(argument, error) &&
        argument.find_first_of("*?[") != std::string::npos) {
      names = matches(argument);
      if (names.empty()) return not_found(argument + ": matches no file");
    }
    for (const std::string& name : names) {
      if (!files::is_directory(name, error)) {
        out.push_back(name);
        continue;
      }
      const size_t before = out.size();
      RETURN_IF_ERROR(add_folder(name, &out));
      if (out.size() == before) return not_found(name + ": has no file");
    }
  }
  return out;
}

}  // namespace remesh::data
