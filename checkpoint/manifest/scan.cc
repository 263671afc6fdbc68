#include "checkpoint/manifest/scan.h"

#include <fmt/format.h>

#include <algorithm>

#include "proto/base/text.h"

namespace remesh::manifest {
namespace {

// A manifest lists slices, not data: thousands of ranks need far less.
constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 30;

std::string base_name(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path.substr(path.find_last_of('/') + 1);
}

Status check_file(FileSystem& fs, const std::string& dir,
                  const pb::ShardFile& file) {
  ASSIGN_OR_RETURN(const uint64_t size, fs.size(path_join(dir, file.name())));
  if (size == file.bytes()) return ok_status();
  return corrupt(fmt::format("{}: {} bytes, the manifest says {}",
                             path_join(dir, file.name()), size, file.bytes()));
}

}  // namespace

Result<pb::Manifest> read_manifest(FileSystem& fs, const std::string& path) {
  const std::string manifest_path = path_join(path, kManifestName);
  ASSIGN_OR_RETURN(const std::string text,
                   read_file(fs, manifest_path, kMaxManifestBytes));
  ASSIGN_OR_RETURN(pb::Manifest m, decode(text).with_context(manifest_path));
  const auto step = parse_step_name(base_name(path));
  if (step && *step != m.step())
    return corrupt(fmt::format("{}: is of step {}: rename it to {}",
                               manifest_path, m.step(), step_name(m.step())));
  return m;
}

Result<pb::Manifest> read_checkpoint(FileSystem& fs, const std::string& path) {
  ASSIGN_OR_RETURN(auto m, read_manifest(fs, path));
  for (const pb::ShardFile& file : m.shards())
    RETURN_IF_ERROR(check_file(fs, path, file));
  return m;
}

bool may_be_kept(FileSystem& fs, const std::string& path) {
  return fs.look_up(path_join(path, kKeepName)).code() != Code::kNotFound;
}

Result<std::vector<Found>> scan(FileSystem& fs, const std::string& folder) {
  std::vector<Found> found;
  const auto names = fs.list(folder);
  if (!names.ok() && names.status().code() == Code::kNotFound) return found;
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    const auto step = parse_step_name(name);
    if (!step) continue;
    Found f{.step = *step, .path = path_join(folder, name)};
    auto manifest = read_checkpoint(fs, f.path);
    f.status = manifest.status();
    if (manifest.ok()) f.manifest = std::move(*manifest);
    f.kept = may_be_kept(fs, f.path);
    found.push_back(std::move(f));
  }
  std::sort(found.begin(), found.end(),
            [](const Found& a, const Found& b) { return a.step > b.step; });
  return found;
}

Status no_such_step(const std::string& folder, int64_t step,
                    const std::vector<Found>& found) {
  std::vector<std::string> steps;
  for (const Found& f : found) steps.push_back(std::to_string(f.step));
  return not_found(fmt::format("{}: no checkpoint of step {}; available: {}",
                               folder, step,
                               steps.empty() ? "none" : join(steps)));
}

const Found* choose_newest_valid(const std::vector<Found>& found) {
  const auto age = [](const Found& f) {
    return std::pair(f.manifest.generation(), f.step);
  };
  const Found* best = nullptr;
  for (const Found& f : found)
    if (f.status.ok() && (best == nullptr || age(f) > age(*best))) best = &f;
  return best;
}

}  // namespace remesh::manifest
