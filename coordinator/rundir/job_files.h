// Job files as the programs of a run use them: resolved with the data set, and
// compared with the job that a run directory already has.
#pragma once

#include <string>
#include <vector>

#include "parallel/jobfile/jobfile.h"
#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"
#include "proto/job.pb.h"

namespace remesh::rundir {

// Vocabulary and size of the data set in folder `dir`, from its index.
Result<jobfile::DataInfo> read_data_info(const std::string& dir);

// How a job is given to a program.
struct JobSource {
  std::string file;              // "": the job of the run directory
  std::vector<std::string> set;  // "section.key=value", overrides the file
};

// Records in the job of a new run what model.init_from stands for now
// (model.init_checkpoint), and the fingerprint of a model that adapters are
// added to (lora.base_fingerprint). InvalidArgument if the former was given and
// is elsewhere, NotFound if there is no model; fails like base_fingerprint().
// Nothing is chosen if nothing is at that path on this host, and the job has
// all sizes.
Status choose_init(FileSystem& fs, pb::Job* job);
// The fingerprint of the model that the job's adapters are added to; "" without
// adapters. Corrupt if the job has another one; fails like WeightSource::open()
// (huggingface/weight_source.h).
Result<std::string> base_fingerprint(FileSystem& fs, const pb::Job& job);

// The resolved job of a run directory, without a look at its data or model;
// NotFound if it has none.
Result<pb::Job> job_of_run(FileSystem& fs, const std::string& run);

// Of the job's data set; "" if it is not on this host.
std::string data_id_of(const pb::Job& job);

// load_job() and resolve(), with the data set and with the model of
// model.init_from. If the data set is not on this host, the job or that model
// must have the vocabulary's size. Keys that `source` does not give are those
// of the job of the run directory `run`, if it has one: a run keeps its
// settings. If it has none, choose_init() applies.
Result<pb::Job> load_resolved(const JobSource& source,
                              const std::string& run = "");

// The run directory that a program's arguments name (choose_run(); without a
// job file find_run()), and its job.
struct OpenedJob {
  std::string run;
  pb::Job job;
  bool made = false;  // the run directory, by open_job()
};
Result<OpenedJob> open_job(const JobSource& source, const std::string& run_dir,
                           bool resume, double unix_s);

// The keys whose difference between the job of a run and the job given to
// continue it would change the training: "train.seed: the run has 1, given is
// 2". The description, paths, the length of the training (and
// schedule.total_steps if it follows train.steps), how often it validates and
// logs, and everything about machines ([parallel], [elastic], [checkpoint],
// train.threads, train.recompute) may change. What a person may want to change
// during a training (learning rate, schedule and the rest of [optimizer],
// train.max_norm, train.dtype) may change if `set` gives it. Both jobs must be
// resolved.
std::vector<std::string> forbidden_differences(
    const pb::Job& run, const pb::Job& given,
    const std::vector<std::string>& set = {});

// What a run directory continues with instead of its present job, for people.
struct JobChange {
  std::string keys;  // "train.steps 40 -> 80"; "" if nothing changes
  // How the learning rate of the next step changes, although no key of it was
  // given with --set; "" if it does not.
  std::string learning_rate;
};
// The events that say so.
std::vector<pb::EventRecord> events_of(const JobChange& change,
                                       const std::string& run);
// What a run is to continue with.
struct Continuation {
  pb::Job job;                   // resolved
  std::vector<std::string> set;  // the overrides that it was loaded with
  bool accept_edits = false;     // of job.toml, by hand
};
// Whether the run directory may continue so. InvalidArgument, naming every key,
// if job.toml was edited by hand, if the run is another training, is known to
// have finished more steps, or was trained on another data set, by its newest
// checkpoint or else the journal; Corrupt if the journal is that of another
// run, or the model that its adapters are added to is here and has other
// weights.
// `journal`: of the run; null if it has none.
Result<JobChange> check_job(FileSystem& fs, const Continuation& with,
                            const std::string& run, const pb::Durable* journal);
// InvalidArgument if somebody has edited job.toml in the run, Corrupt if it is
// not of the same run as the journal.
Status check_unedited(FileSystem& fs, const std::string& run,
                      const pb::Durable& journal);
// Makes `job` the job of the run directory: writes job.toml. `run_id`: in a
// comment, with a hash by which check_job() knows the file from one that was
// edited; 0 if unknown.
Status write_job(FileSystem& fs, const pb::Job& job, const std::string& run,
                 uint64_t run_id = 0);

// The last finished step in the metrics of a run; 0 if there is none.
int64_t last_finished_step(const std::string& run);
// The newest lines of metrics.jsonl that are metrics, in order: some 200.
std::vector<pb::StepMetrics> recent_metrics(const std::string& run);

}  // namespace remesh::rundir
