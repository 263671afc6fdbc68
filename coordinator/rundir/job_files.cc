#include "coordinator/rundir/job_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "coordinator/rundir/run_dir.h"
#include "proto/base/text.h"
#include "proto/data/index.h"

namespace remesh::rundir {
namespace {

constexpr uint64_t kMaxJobBytes = uint64_t{16} << 20;

bool free_to_change(const std::string& key, bool length_follows,
                    bool warmup_follows) {
  static const std::set<std::string> kSections = {"parallel", "elastic",
                                                  "checkpoint", "profile"};
  static const std::set<std::string> kKeys = {
      "job.description",       "job.dump_folder",  "data.path",
      "train.steps",           "train.threads",    "train.recompute",
      "train.recompute_every", "train.eval_every", "train.log_every",
      "train.eval_sequences",  "train.peak_flops", "train.backend"};
  return kSections.contains(key.substr(0, key.find('.'))) ||
         kKeys.contains(key) ||
         (length_follows && key == "schedule.total_steps") ||
         (warmup_follows && key == "schedule.warmup_steps");
}

// Whether resolve() derived the length of the schedule from train.steps, so
// that changing train.steps alone changes it.
bool length_follows_steps(const pb::Job& job) {
  return job.schedule().total_steps() == job.train().steps();
}

// Likewise for the warm-up: the default, limited by the schedule's length.
bool warmup_follows_steps(const pb::Job& job) {
  const pb::Schedule& s = job.schedule();
  return length_follows_steps(job) &&
         s.warmup_steps() ==
             std::min(pb::Schedule::default_instance().warmup_steps(),
                      s.total_steps());
}

}  // namespace

Result<jobfile::DataInfo> read_data_info(const std::string& dir) {
  const std::string path = dir + "/" + data::kIndexName;
  Result<std::string> text = read_file(path);
  if (!text.ok()) {
    if (text.status().code() != Code::kNotFound)
      return text.status().with_context("data.path");
    return not_found("data.path: " + dir +
                     " contains no data set (no dataset.json); create one with "
                     "`remesh data prepare --input TEXT --out " +
                     dir + "`");
  }
  const auto advise = [&](const Status& s) {
    return Status(s.code(),
                  s.message() +
                      "; restore the data set, or create it again with "
                      "`remesh data prepare --overwrite --out " +
                      dir + " ...`");
  };
  const Result<data::Index> parsed = data::parse_index(*text, path);
  if (!parsed.ok()) return advise(parsed.status());
  const data::Index& index = *parsed;
  if (const Status s = data::check_shard_files(dir, index); !s.ok())
    return advise(s);
  return jobfile::DataInfo{.vocab_size = index.vocab_size,
                           .train_tokens = index.train_tokens(),
                           .val_tokens = index.val_tokens()};
}

Result<pb::Job> load_resolved(const std::string& path,
                              const std::vector<std::string>& overrides) {
  ASSIGN_OR_RETURN(const pb::Job job, jobfile::load_job(path, overrides));
  Result<jobfile::DataInfo> info = read_data_info(job.data().path());
  if (!info.ok()) {
    if (info.status().code() != Code::kNotFound ||
        job.model().vocab_size() <= 0) {
      return info.status();
    }
    jobfile::DataInfo unknown;
    unknown.vocab_size = job.model().vocab_size();
    return jobfile::resolve(job, unknown);
  }
  return jobfile::resolve(job, *info);
}

std::vector<std::string> forbidden_differences(const pb::Job& run,
                                               const pb::Job& given) {
  const bool length = length_follows_steps(run) && length_follows_steps(given);
  const bool warmup = warmup_follows_steps(run) && warmup_follows_steps(given);
  std::vector<std::string> out;
  for (const jobfile::Difference& d : jobfile::differences(run, given))
    if (!free_to_change(d.key, length, warmup))
      out.push_back(fmt::format("{}: the run has {}, given is {}", d.key,
                                d.first, d.second));
  return out;
}

Status adopt_job(FileSystem& fs, const pb::Job& job, const std::string& run) {
  const std::string path = job_path(run);
  const std::string text = jobfile::to_toml(job);
  const Result<std::string> before = remesh::read_file(fs, path, kMaxJobBytes);
  if (before.ok()) {
    if (*before == text) return ok_status();
    ASSIGN_OR_RETURN(const pb::Job loaded,
                     jobfile::parse_job(*before, {path, run}));
    jobfile::DataInfo info;
    info.vocab_size = loaded.model().vocab_size();
    ASSIGN_OR_RETURN(const pb::Job held, jobfile::resolve(loaded, info));
    const auto differences = forbidden_differences(held, job);
    if (!differences.empty()) {
      return invalid_argument(fmt::format(
          "{} contains a run with other values; restore them, or start a new "
          "run with another --run-dir:\n  {}",
          run, join(differences, "\n  ")));
    }
  } else if (before.status().code() != Code::kNotFound) {
    return before.status();
  }
  return write_file_atomically(fs, path, text);
}

}  // namespace remesh::rundir
