// `remesh fork`: a new run that continues from a checkpoint of another one with
// another learning rate, data set or batch.
#include <fmt/format.h>

#include <filesystem>
#include <memory>

#include "checkpoint/manifest/scan.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/known_runs.h"
#include "coordinator/rundir/line_file.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "coordinator/server/journal.h"
#include "proto/base/clock.h"
#include "proto/base/sharing.h"
#include "proto/base/text.h"
#include "proto/data/index.h"
#include "proto/rundir/events.h"

namespace remesh::ctl {
namespace {

namespace fs = std::filesystem;

struct ForkOptions {
  std::string run;
  int64_t at = -1;  // -1: the newest checkpoint
  std::string out;  // "": a new run beside the other one
  std::vector<std::string> set;
  bool json = false;
};

Result<manifest::Found> checkpoint_of(FileSystem& files,
                                      const std::string& folder, int64_t step) {
  ASSIGN_OR_RETURN(auto found, manifest::scan(files, folder));
  const manifest::Found* newest = manifest::choose_newest_valid(found);
  if (step < 0 && newest != nullptr) return *newest;
  std::vector<std::string> steps;
  for (manifest::Found& f : found) {
    if (!f.status.ok()) continue;
    if (f.step == step) return std::move(f);
    steps.push_back(std::to_string(f.step));
  }
  return not_found(fmt::format("{}: no checkpoint{}; {}", folder,
                               step < 0 ? "" : fmt::format(" of step {}", step),
                               steps.empty()
                                   ? "save one: remesh checkpoint save"
                                   : "those that can be used: " + join(steps)));
}

// The job of the new run, and the manifest of its first checkpoint. It uses
// each sequence once if data, batch or both stay the same.
Status adapt(const pb::Job& before, int64_t step, pb::Job* job,
             pb::Manifest* m) {
  for (const jobfile::Difference& d : jobfile::differences(before, *job))
    if (d.key.starts_with("model.") || d.key.starts_with("lora."))
      return invalid_argument(fmt::format(
          "{} = {}: the checkpoint's model has {}; a fork keeps the model",
          d.key, d.second, d.first));
  if (job->train().steps() <= step)
    return invalid_argument(fmt::format(
        "train.steps = {}: the checkpoint has made step {}; give more, for "
        "example --set train.steps={}",
        job->train().steps(), step, 2 * step));
  RETURN_IF_ERROR(rundir::read_data_info(job->data().path()).status());
  ASSIGN_OR_RETURN(const data::Index index,
                   data::read_index(job->data().path()));
  const pb::Train &was = before.train(), &is = job->train();
  const bool same_order = index.data_id == m->data_id() &&
                          is.seed() == was.seed() &&
                          is.seq_len() == was.seq_len();
  if (!same_order) m->set_sequences(0);
  job->mutable_data()->set_sequence_offset(m->sequences() -
                                           step * is.global_batch_size());
  m->set_data_id(index.data_id);
  m->set_seed(is.seed());
  m->set_seq_len(is.seq_len());
  m->set_global_batch_size(is.global_batch_size());
  return ok_status();
}

// The same bytes under another name, in the place of what a fork that was
// killed has left; a link costs nothing.
Status link_or_copy(FileSystem& files, const std::string& from,
                    const std::string& to) {
  std::error_code error;
  fs::remove(to, error);
  fs::create_hard_link(from, to, error);
  if (!error) return ok_status();
  // std::filesystem does not tell a full disk from other errors.
  const fs::space_info disk = fs::space(fs::path(to).parent_path(), error);
  if (const auto bytes = fs::file_size(from, error);
      !error && disk.available < bytes)
    return exhausted(fmt::format("{}: no room for a copy: {} bytes of {} free",
                                 to, disk.available, bytes));
  fs::copy_file(from, to, error);
  if (error) return io_error(to + ": cannot copy: " + error.message());
  ASSIGN_OR_RETURN(const auto copy, files.open_to_write(to));
  return copy->sync();
}

// The manifest is last: without it there is no checkpoint.
Status put_checkpoint(FileSystem& files, const std::string& from,
                      const std::string& to, const pb::Manifest& m) {
  RETURN_IF_ERROR(files.create_dirs(to));
  for (const pb::ShardFile& s : m.shards())
    RETURN_IF_ERROR(link_or_copy(files, path_join(from, s.name()),
                                 path_join(to, s.name())));
  if (m.has_index())
    RETURN_IF_ERROR(link_or_copy(files, path_join(from, m.index().name()),
                                 path_join(to, m.index().name())));
  RETURN_IF_ERROR(files.sync_dir(to));
  return write_file_atomically(files, path_join(to, manifest::kManifestName),
                               manifest::encode(m));
}

// The history up to the step, so that curves and rates are whole.
Status put_history(FileSystem& files, const std::string& from,
                   const std::string& to, const manifest::Found& start) {
  std::string text;
  for (const std::string& line : rundir::read_lines(rundir::metrics_path(from)))
    if (const auto m = rundir::parse_metrics_line(line);
        m.ok() && m->step() <= start.step)
      text += line + "\n";
  RETURN_IF_ERROR(write_file(files, rundir::metrics_path(to), text));
  pb::EventRecord e;
  e.set_time(unix_seconds());
  e.set_event(events::kForked.name);
  e.set_generation(start.manifest.generation());
  e.set_step(start.step);
  e.set_detail(fmt::format("from step {} of {}", start.step, from));
  return write_file(files, rundir::events_path(to),
                    rundir::event_line(e) + "\n");
}

// The history makes it a run, so it comes after the checkpoint.
Status fill(FileSystem& files, const std::string& from,
            const manifest::Found& start, const pb::Job& job,
            const std::string& checkpoint, const std::string& to) {
  pb::Manifest m = start.manifest;
  m.set_run_id(rundir::new_run_id(to));
  m.set_job(job.job().name());
  RETURN_IF_ERROR(put_checkpoint(files, start.path, checkpoint, m));
  RETURN_IF_ERROR(put_history(files, from, to, start));
  return rundir::write_job(files, job, to, m.run_id());
}

// Leaves nothing of a fork that fails.
Status make_run(FileSystem& files, const std::string& from,
                const manifest::Found& start, const pb::Job& job,
                const std::string& to) {
  ASSIGN_OR_RETURN(const auto lock, rundir::RunLock::acquire(to));
  if (lock->was_run())
    return already_exists(to + ": is a run already; give another --out");
  const std::string folder =
      rundir::checkpoints_path(to, job.checkpoint().folder());
  const std::string checkpoint =
      path_join(folder, manifest::step_name(start.step));
  Status made = lock->begin(files);
  if (made.ok() && files.exists(path_join(checkpoint, manifest::kManifestName)))
    made = already_exists(checkpoint + ": exists; give another --out");
  if (made.ok()) {
    made = fill(files, from, start, job, checkpoint, to);
    if (!made.ok()) (void)remove_all(files, checkpoint).ok();
    if (!made.ok() && folder.starts_with(to + "/"))
      (void)files.remove(folder).ok();  // if it is empty
  }
  if (!made.ok()) lock->remove_unstarted(files);
  return made;
}

Result<int> fork_run(const ForkOptions& o) {
  for (const std::string& s : o.set)
    if (jobfile::override_key(s) == "data.sequence_offset")
      return invalid_argument(
          s + ": a fork derives it, so that each sequence is used once");
  RETURN_IF_ERROR(share_new_files(/*group=*/""));
  const auto files = posix_file_system();
  ASSIGN_OR_RETURN(const std::string run, rundir::find_run(o.run));
  if (const auto journal =
          server::read_journal(*files, rundir::journal_path(run));
      journal.ok())
    RETURN_IF_ERROR(rundir::check_unedited(*files, run, *journal));
  ASSIGN_OR_RETURN(const pb::Job before, rundir::load_resolved({}, run));
  ASSIGN_OR_RETURN(pb::Job job, rundir::load_resolved({"", o.set}, run));
  ASSIGN_OR_RETURN(
      manifest::Found start,
      checkpoint_of(*files,
                    rundir::checkpoints_path(run, before.checkpoint().folder()),
                    o.at));
  RETURN_IF_ERROR(adapt(before, start.step, &job, &start.manifest));
  ASSIGN_OR_RETURN(
      const std::string to,
      rundir::choose_run(fs::path(run).parent_path().string(), job.job().name(),
                         o.out, /*resume=*/false, unix_seconds()));
  const rundir::RemovedIfEmpty unused{o.out.empty() ? to : ""};
  // A folder has the checkpoints of one run.
  const auto folder_of = [](const std::string& of, const pb::Job& its) {
    return fs::path(rundir::checkpoints_path(of, its.checkpoint().folder()))
        .lexically_normal();
  };
  if (folder_of(to, job) == folder_of(run, before))
    job.mutable_checkpoint()->set_folder("checkpoints");
  RETURN_IF_ERROR(make_run(*files, run, start, job, to));
  rundir::note_run(to);
  return print_done(
      o.json, {{"run_dir", to}, {"from", run}, {"step", start.step}},
      fmt::format("made {} from step {} of {}\nto continue: remesh resume {}\n",
                  rundir::short_path(to), start.step, rundir::short_path(run),
                  rundir::typed_path(to)));
}

}  // namespace

void add_fork_verb(CLI::App* app, int* code) {
  auto o = std::make_shared<ForkOptions>();
  CLI::App* c = app->add_subcommand(
      "fork", "Make a new run from a checkpoint, with other settings");
  add_run_option(c, &o->run);
  c->add_option("--at", o->at, "Step of the checkpoint. Default: the newest")
      ->check(CLI::Range(int64_t{1}, INT64_MAX));
  c->add_option("--out", o->out,
                "Folder of the new run. Default: a new one beside RUN");
  add_set_option(c, &o->set);
  add_json_option(c, &o->json);
  c->footer(R"(
Examples:
  remesh fork runs/books --at 1000 --set optimizer.lr=1e-4
  remesh fork runs/books --set data.path=data/poems --set train.steps=3000

The new run continues from the checkpoint with any learning rate, schedule, data
set or batch; the model stays. RUN may be training meanwhile. With the same data
every sequence is used once, also after a change of the batch size; with other
data it begins at the first sequence.)");
  c->callback([o, code] { *code = exit_code(fork_run(*o)); });
}

}  // namespace remesh::ctl
