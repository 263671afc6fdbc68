#include "coordinator/ctl/find_checkpoint.h"

#include <fmt/format.h>

#include <filesystem>

#include "checkpoint/huggingface/transfer.h"
#include "checkpoint/huggingface/weight_source.h"
#include "checkpoint/manifest/manifest.h"
#include "checkpoint/manifest/scan.h"
#include "coordinator/rundir/run_dir.h"
#include "parallel/jobfile/jobfile.h"
#include "proto/base/entries.h"

namespace remesh::ctl {

namespace fs = std::filesystem;

bool is_checkpoint(const std::string& path) {
  if (path_exists(path + "/" + manifest::kManifestName)) return true;
  const std::string name = fs::path(absolute_path(path)).filename();
  return is_folder(path) && manifest::parse_step_name(name).has_value();
}

Result<std::string> checkpoint_folder(const std::string& run) {
  ASSIGN_OR_RETURN(const pb::Job job, jobfile::load_job(rundir::job_path(run)));
  return rundir::checkpoints_path(run, job.checkpoint().folder());
}

Result<std::string> checkpoint_folder_of(const std::string& target) {
  if (!target.empty() && !rundir::is_run(target))
    for (const fs::path& path : entries_of(target))
      if (is_checkpoint(path.string())) return absolute_path(target);
  ASSIGN_OR_RETURN(const std::string run, rundir::find_run(target));
  return checkpoint_folder(run);
}

Result<std::string> one_checkpoint(const std::string& target, int64_t step) {
  if (!target.empty() && is_checkpoint(target)) {
    if (step < 0) return absolute_path(target);
    return invalid_argument(fmt::format(
        "--step {}: {} is one checkpoint, not a run", step, target));
  }
  ASSIGN_OR_RETURN(const std::string folder, checkpoint_folder_of(target));
  if (step >= 0) {
    const std::string path = folder + "/" + manifest::step_name(step);
    if (is_folder(path)) return path;
  }
  const auto system = posix_file_system();
  ASSIGN_OR_RETURN(const auto found, manifest::scan(*system, folder));
  if (step >= 0) return manifest::no_such_step(folder, step, found);
  if (found.empty()) return not_found(folder + ": no checkpoint");
  const auto* newest = manifest::choose_newest_valid(found);
  return newest == nullptr ? found.front().path : newest->path;
}

std::string model_continued(FileSystem& fs, const std::string& target,
                            const std::string& checkpoint) {
  const auto named = rundir::find_run(target);
  const std::string run =
      named.ok() ? *named : parent_path(parent_path(checkpoint));
  const auto job = jobfile::load_job(rundir::job_path(run));
  const auto model = huggingface::model_of(fs, checkpoint);
  if (!job.ok() || !model.ok()) return "";
  const std::string& init = jobfile::init_path(job->model());
  if (init.empty()) return "";
  return huggingface::config_like(fs, init, *model).ok() ? init : "";
}

}  // namespace remesh::ctl
