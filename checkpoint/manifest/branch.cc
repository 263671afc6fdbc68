#include "checkpoint/manifest/branch.h"

#include <fmt/format.h>

#include <algorithm>

#include "proto/base/number.h"

namespace remesh::manifest {
namespace {

constexpr std::string_view kPrefix = ".claim-g";

// ".claim-g7"
std::string claim_name(int64_t generation) {
  return fmt::format("{}{}", kPrefix, generation);
}

std::optional<int64_t> parse_claim_name(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const auto generation = parse_number<int64_t>(name.substr(kPrefix.size()));
  return generation && *generation >= 0 ? generation : std::nullopt;
}

}  // namespace

bool of_branch(const std::optional<Origin>& origin, int64_t generation,
               int64_t step, int64_t saver) {
  if (saver == generation) return true;
  if (saver > generation) return false;
  if (!origin || step < origin->step) return true;
  return step == origin->step && saver == origin->generation;
}

Status claim(FileSystem& fs, const std::string& folder, int64_t generation) {
  RETURN_IF_ERROR(fs.create_dirs(folder));
  RETURN_IF_ERROR(
      fs.create(path_join(folder, claim_name(generation))).status());
  ASSIGN_OR_RETURN(const auto names, fs.list(folder));
  for (const std::string& name : names)
    if (const auto g = parse_claim_name(name); g && *g < generation)
      RETURN_IF_ERROR(fs.remove(path_join(folder, name)));
  return ok_status();
}

Result<int64_t> claimed(FileSystem& fs, const std::string& folder) {
  const auto names = fs.list(folder);
  if (!names.ok() && names.status().code() == Code::kNotFound) return 0;
  if (!names.ok()) return names.status();
  int64_t newest = 0;
  for (const std::string& name : *names)
    newest = std::max(newest, parse_claim_name(name).value_or(0));
  return newest;
}

Status check_claim(FileSystem& fs, const std::string& folder,
                   int64_t generation) {
  ASSIGN_OR_RETURN(const int64_t newest, claimed(fs, folder));
  if (newest <= generation) return ok_status();
  return cancelled(
      fmt::format("{}: generation {} has claimed it; generation {} is fenced",
                  folder, newest, generation));
}

}  // namespace remesh::manifest
