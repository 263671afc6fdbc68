#include "coordinator/ctl/scratch_names.h"

#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/memory/segment_directory.h"
#include "proto/base/file_system.h"
#include "proto/base/rng.h"

namespace remesh::ctl {

std::string scratch_name(const std::string& worker, const std::string& run) {
  return fmt::format("{}-{:016x}", worker, hash64(real_path(run)));
}

std::vector<std::string> scratch_names(
    int workers, const std::string& run, const std::string& root,
    const std::set<std::string>& state_folders) {
  std::vector<std::string> out;
  for (int i = 1; i <= workers; ++i)
    out.push_back(scratch_name(fmt::format("local-{}", i), run));
  std::set<std::string> holders, gone;
  for (const std::string& folder : state_folders) {
    const std::string owner = memory::owner_of(folder);
    const std::string name = owner.substr(owner.rfind('/') + 1);
    if (parent_path(owner) != root) continue;
    holders.insert(name);
    if (std::ranges::find(out, name) == out.end() && !memory::may_live(owner))
      gone.insert(name);
  }
  for (std::string& name : out)
    if (!gone.empty() && !holders.contains(name))
      name = gone.extract(gone.begin()).value();
  return out;
}

}  // namespace remesh::ctl
