// `remesh ckpt ...`
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/manifest/manifest.h"
#include "checkpoint/manifest/scan.h"
#include "checkpoint/store/verify.h"
#include "coordinator/ctl/commands.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "proto/base/text.h"
#include "proto/jobfile/jobfile.h"

namespace remesh::ctl {
namespace {

namespace fs = std::filesystem;

bool is_checkpoint(const std::string& path) {
  std::error_code error;
  if (fs::exists(path + "/" + manifest::kManifestName, error)) return true;
  const std::string name = fs::path(rundir::absolute(path)).filename();
  return fs::is_directory(path, error) &&
         manifest::parse_step_name(name).has_value();
}

// Folder of the checkpoints of a run, or the path itself when checkpoints lie
// right in it.
Result<std::string> folder_of(const std::string& target) {
  std::error_code error;
  if (!target.empty() && !rundir::is_run(target)) {
    for (fs::directory_iterator it(target, error), end; it != end;
         it.increment(error)) {
      if (error) break;
      if (is_checkpoint(it->path().string())) return rundir::absolute(target);
    }
  }
  ASSIGN_OR_RETURN(const std::string run, rundir::find_run(target));
  ASSIGN_OR_RETURN(const pb::Job job, jobfile::load_job(rundir::job_path(run)));
  const std::string& folder = job.checkpoint().folder();
  return folder.starts_with('/') ? folder : run + "/" + folder;
}

// The one checkpoint that the options name.
Result<std::string> one_checkpoint(const CkptOptions& options) {
  if (!options.target.empty() && is_checkpoint(options.target)) {
    return rundir::absolute(options.target);
  }
  ASSIGN_OR_RETURN(const std::string folder, folder_of(options.target));
  if (options.step >= 0) {
    const std::string path = folder + "/" + manifest::step_name(options.step);
    std::error_code error;
    if (fs::is_directory(path, error)) return path;
  }
  const auto system = manifest::posix_file_system();
  ASSIGN_OR_RETURN(const auto found, manifest::scan(*system, folder));
  if (options.step >= 0) {
    std::vector<std::string> steps;
    for (const auto& f : found) steps.push_back(fmt::format("{}", f.step));
    return not_found(fmt::format("{}: no checkpoint of step {}; there are: {}",
                                 folder, options.step,
                                 steps.empty() ? "none" : join(steps)));
  }
  if (found.empty()) return not_found(folder + ": no checkpoint");
  const auto* newest = manifest::choose_newest_valid(found);
  return newest == nullptr ? found.front().path : newest->path;
}

uint64_t bytes_of(const pb::Manifest& m) {
  uint64_t bytes = 0;
  for (const pb::ShardFile& s : m.shards()) bytes += s.bytes();
  return bytes;
}

}  // namespace

int ckpt_list_command(const CkptOptions& options) {
  const auto folder = folder_of(options.target);
  if (!folder.ok()) return fail(folder.status());
  const auto system = manifest::posix_file_system();
  const auto found = manifest::scan(*system, folder.value());
  if (!found.ok()) return fail(found.status());
  if (options.json) {
    auto array = nlohmann::ordered_json::array();
    for (const auto& f : found.value()) {
      array.push_back({{"step", f.step},
                       {"path", f.path},
                       {"valid", f.status.ok()},
                       {"problem", f.status.message()},
                       {"bytes", bytes_of(f.manifest)}});
    }
    fmt::print("{}\n", array.dump(2, ' ', false,
                                  nlohmann::json::error_handler_t::replace));
    return kExitOk;
  }
  if (found.value().empty())
    fmt::print("no checkpoint in {}\n", folder.value());
  for (const auto& f : found.value()) {
    if (!f.status.ok()) {
      fmt::print("{:>10}  does not count: {}\n", f.step, f.status.message());
      continue;
    }
    fmt::print("{:>10}  {:>10}  {} shard{} of {}  {}\n", f.step,
               format_bytes(bytes_of(f.manifest)), f.manifest.shards_size(),
               f.manifest.shards_size() == 1 ? "" : "s",
               rundir::mesh_text(f.manifest.mesh()), f.path);
  }
  return kExitOk;
}

int ckpt_inspect_command(const CkptOptions& options) {
  const auto path = one_checkpoint(options);
  if (!path.ok()) return fail(path.status());
  const auto system = manifest::posix_file_system();
  const auto manifest = manifest::read_checkpoint(*system, path.value());
  if (!manifest.ok()) return fail(manifest.status());
  if (options.json) {
    fmt::print("{}\n", store::describe_json(manifest.value()));
  } else {
    fmt::print("{}\n{}", path.value(), store::describe(manifest.value()));
  }
  return kExitOk;
}

int ckpt_verify_command(const CkptOptions& options) {
  const auto path = one_checkpoint(options);
  if (!path.ok()) return fail(path.status());
  const auto system = manifest::posix_file_system();
  const store::VerifyReport report = store::verify(*system, path.value());
  if (options.json) {
    fmt::print("{}\n", store::describe_json(report));
  } else {
    fmt::print("{}\n{}", path.value(), store::describe(report));
  }
  return report.ok ? kExitOk : kExitFailed;
}

}  // namespace remesh::ctl
