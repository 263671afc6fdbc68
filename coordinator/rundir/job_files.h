// Job files as the programs of a run use them: resolved with the data set, and
// compared with the job that a run directory already has.
#pragma once

#include <string>
#include <vector>

#include "parallel/jobfile/jobfile.h"
#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "proto/job.pb.h"

namespace remesh::rundir {

// Vocabulary and size of the data set in folder `dir`, from its index.
Result<jobfile::DataInfo> read_data_info(const std::string& dir);

// load_job() and resolve(). If the data set is not on this host, the job must
// have model.vocab_size.
Result<pb::Job> load_resolved(const std::string& path,
                              const std::vector<std::string>& overrides);

// The keys whose difference between the job of a run and the job given to
// continue it would change the training: "train.seed: the run has 1, given is
// 2". The description, paths, the length of the training (and
// schedule.total_steps if it follows train.steps), how often it validates and
// logs, and everything about machines ([parallel], [elastic], [checkpoint],
// train.threads, train.recompute) may change. Both jobs must be resolved.
std::vector<std::string> forbidden_differences(const pb::Job& run,
                                               const pb::Job& given);

// Makes `job` the job of the run directory: writes job.toml. InvalidArgument,
// naming every key, if the directory contains another training.
Status adopt_job(FileSystem& fs, const pb::Job& job, const std::string& run);

}  // namespace remesh::rundir
