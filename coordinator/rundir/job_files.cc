#include "coordinator/rundir/job_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>

#include "checkpoint/huggingface/weight_source.h"
#include "checkpoint/manifest/scan.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/newest_state.h"
#include "coordinator/rundir/run_dir.h"
#include "parallel/jobfile/lr_schedule.h"
#include "proto/base/rng.h"
#include "proto/base/text.h"
#include "proto/data/index.h"
#include "proto/rundir/events.h"
#include "proto/rundir/file_tail.h"
#include "proto/rundir/run_id.h"

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

bool moves_rate(const std::string& key) {
  return key == "optimizer.lr" || key.starts_with("schedule.");
}

// Hyperparameters that may change during a training, if a person says so.
bool free_on_request(const std::string& key) {
  static const std::set<std::string> kKeys = {
      "train.max_norm",     "train.dtype",  "train.max_skipped_steps",
      "train.spike_factor", "train.z_loss", "train.digest"};
  return moves_rate(key) || kKeys.contains(key) ||
         (key.starts_with("optimizer.") && key != "optimizer.name");
}

std::set<std::string> keys_of(const std::vector<std::string>& set) {
  std::set<std::string> keys;
  for (const std::string& s : set) keys.insert(jobfile::override_key(s));
  return keys;
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

// The model whose weights the run starts from, if the job leaves its sizes to
// it.
Result<std::optional<geometry::ModelConfig>> read_init_model(
    const pb::Model& model) {
  if (model.init_from().empty() || jobfile::has_every_size(model))
    return std::optional<geometry::ModelConfig>();
  auto init =
      huggingface::model_of(*posix_file_system(), jobfile::init_path(model));
  if (!init.ok()) return init.status().with_context("model.init_from");
  return std::optional(*std::move(init));
}

Result<pb::Job> resolve_with_data(const pb::Job& job) {
  ASSIGN_OR_RETURN(const auto init, read_init_model(job.model()));
  Result<jobfile::DataInfo> info = read_data_info(job.data().path());
  if (!info.ok()) {
    const int64_t vocab_size =
        init ? init->vocab_size : job.model().vocab_size();
    if (info.status().code() != Code::kNotFound || vocab_size <= 0)
      return info.status();
    info = jobfile::DataInfo{.vocab_size = vocab_size};
  }
  info->init_model = init;
  return jobfile::resolve(job, *info);
}

// The resolved job in such a text.
Result<pb::Job> resolve_text(const std::string& text, const std::string& path,
                             const std::string& run) {
  ASSIGN_OR_RETURN(const pb::Job loaded, jobfile::parse_job(text, {path, run}));
  jobfile::DataInfo info;
  info.vocab_size = loaded.model().vocab_size();
  return jobfile::resolve(loaded, info);
}

// The model or folder of checkpoints that init_from names; of a run that of its
// checkpoints. Without links, which may point elsewhere later.
Result<std::string> init_place(FileSystem& fs, const std::string& path) {
  std::error_code error;
  std::string place = path;
  if (is_run(path)) {
    ASSIGN_OR_RETURN(const std::string run, find_run(path));
    ASSIGN_OR_RETURN(const pb::Job job, job_of_run(fs, run));
    place = checkpoints_path(run, job.checkpoint().folder());
  }
  const auto real = std::filesystem::weakly_canonical(place, error);
  return error ? place : real.string();
}

Status choose_checkpoint(FileSystem& fs, pb::Model& m) {
  ASSIGN_OR_RETURN(const std::string place, init_place(fs, m.init_from()));
  if (const std::string& given = m.init_checkpoint(); !given.empty())
    return parent_path(given) == place || given == place
               ? ok_status()
               : invalid_argument(fmt::format(
                     "model.init_checkpoint = {}: is not in {}, where "
                     "model.init_from = {} has its checkpoints; leave it out, "
                     "or name the checkpoint with model.init_from alone",
                     given, place, m.init_from()));
  const auto found = huggingface::find_weights(fs, place);
  if (!found.ok()) return found.status().with_context("model.init_from");
  if (!huggingface::is_model(fs, *found) && *found != m.init_from())
    m.set_init_checkpoint(*found);
  return ok_status();
}

// The sizes that a file leaves to the model of init_from are those that the run
// was made with: that model is not read again.
void keep_open_sizes(const pb::Model& held, pb::Model* m) {
  if (m->init_from().empty()) return;
  if (m->n_kv_heads() == -1) m->set_n_kv_heads(held.n_kv_heads());
  if (m->head_dim() == -1) m->set_head_dim(held.head_dim());
  if (m->hidden_dim() == -1) m->set_hidden_dim(held.hidden_dim());
  if (m->vocab_size() == -1) m->set_vocab_size(held.vocab_size());
}

// How another schedule changes the learning rate of the step after `done`,
// compared with that of the last step made.
std::string learning_rate_text(const pb::Job& run, const pb::Job& job,
                               const std::string& dir, int64_t done) {
  const auto before = jobfile::lr_schedule(run);
  const auto after = jobfile::lr_schedule(job);
  if (!before.ok() || !after.ok()) return "";
  const auto rate = [](double r) { return fmt::format("{:.2e}", r); };
  const std::string would = rate(jobfile::learning_rate(*before, done));
  const std::string is = rate(jobfile::learning_rate(*after, done));
  if (would == is) return "";
  // The job may have changed since that step.
  const auto recent = recent_metrics(dir);
  const bool known =
      !recent.empty() && recent.back().step() == done && recent.back().has_lr();
  const std::string last = rate(
      known ? recent.back().lr() : jobfile::learning_rate(*before, done - 1));
  return fmt::format(
      "step {} has {} after {} at step {}, because schedule.total_steps "
      "follows train.steps; to keep the schedule, by which it would have {}, "
      "add --set schedule.total_steps={}",
      done + 1, is, last, done, would, run.schedule().total_steps());
}

Status check_steps(const pb::Job& job, const std::string& run,
                   const NewestState& newest) {
  if (job.train().steps() >= newest.step) return ok_status();
  const std::string where = state_text(newest);
  return invalid_argument(
      fmt::format("train.steps = {}: {} has finished step {}{}; give more "
                  "steps, for example --set train.steps={}",
                  job.train().steps(), run, newest.step,
                  where.empty() ? "" : " (" + where + ")", 2 * newest.step));
}

// Another data set may be given, or the same folder prepared again: the samples
// would not be those that the training left off with. Before the first
// checkpoint only the journal knows which that was.
Status check_data(FileSystem& fs, const pb::Job& job, const std::string& run,
                  const std::string& journaled) {
  const Result<data::Index> read = data::read_index(job.data().path());
  if (!read.ok() && read.status().code() != Code::kCorrupt)
    return ok_status();  // reported by those who open it
  ASSIGN_OR_RETURN(const data::Index given, read);
  const auto found =
      manifest::scan(fs, checkpoints_path(run, job.checkpoint().folder()));
  // Without the folder the journal may know it.
  if (!found.ok() && journaled.empty()) return found.status();
  const manifest::Found* newest =
      found.ok() ? manifest::choose_newest_valid(*found) : nullptr;
  const std::string& id = newest ? newest->manifest.data_id() : journaled;
  if (id == given.data_id || (newest == nullptr && id.empty()))
    return ok_status();
  return invalid_argument(fmt::format(
      "data.path: {} is not the data set that this run was trained on ({}, "
      "but {} has {}); give the folder of that one (--set data.path=...), or "
      "start a new run with another --run-dir",
      job.data().path(), given.data_id, newest ? newest->path : run, id));
}

// The last line of a job.toml, below that text.
std::string last_line(uint64_t id, const std::string& above) {
  return fmt::format("\n{}{:016x} {:016x}\n", kRunIdMark, id, hash64(above));
}

// Whether job.toml is as a coordinator wrote it. One that died before it wrote
// the journal leaves a job there that the journal does not have.
bool is_unedited(FileSystem& fs, const std::string& run) {
  const auto text = remesh::read_file(fs, job_path(run), kMaxJobBytes);
  if (!text.ok()) return false;
  const size_t at = text->rfind("\n" + std::string(kRunIdMark));
  return at != std::string::npos &&
         text->substr(at) == last_line(run_id_of(fs, run), text->substr(0, at));
}

// The journal and job.toml belong to one run, and nobody has edited job.toml
// since the journal was written.
Status check_identity(FileSystem& fs, bool accept_edits, const std::string& run,
                      const Result<pb::Job>& file, const pb::Durable& journal) {
  if (!file.ok()) return ok_status();
  const uint64_t id = run_id_of(fs, run);
  if (id != 0 && journal.run_id() != 0 && id != journal.run_id())
    return corrupt(fmt::format(
        "{} belongs to run {:016x}, but {} to run {:016x}: one of them is from "
        "another run. Put the right one back, or move the journal away to "
        "continue from the newest checkpoint",
        journal_path(run), journal.run_id(), job_path(run), id));
  if (!journal.has_job() || accept_edits) return ok_status();
  // Read back as the file is, so that the two differ in nothing but edits.
  ASSIGN_OR_RETURN(
      const pb::Job written,
      resolve_text(jobfile::to_toml(journal.job()), journal_path(run), run));
  const std::string edits = jobfile::changes_text(written, *file);
  if (edits.empty()) return ok_status();
  return invalid_argument(fmt::format(
      "{} was edited by hand: {}. Continue the run with --accept-edits to take "
      "that, or undo it; "
      "`--set section.key=value` changes a key without editing",
      job_path(run), edits));
}

}  // namespace

Result<jobfile::DataInfo> read_data_info(const std::string& dir) {
  const Result<data::Index> parsed = data::read_index(dir);
  const bool is_file = path_exists(dir) && !is_folder(dir);
  if (is_file || parsed.status().code() == Code::kNotFound)
    return not_found(fmt::format(
        "data.path: {} {}; create one with `remesh data prepare --input {}`",
        dir,
        is_file ? "is a file, no data set"
                : "contains no data set (no dataset.json)",
        is_file ? typed_path(dir) + " --out FOLDER"
                : "TEXT --out " + typed_path(dir)));
  if (!parsed.ok() && parsed.status().code() != Code::kCorrupt)
    return parsed.status().with_context("data.path");
  const auto advise = [&](const Status& s) {
    const bool mixture = parsed.ok() && !parsed->members.empty();
    return Status(
        s.code(),
        s.message() +
            (mixture
                 ? "; restore that data set, of which " + typed_path(dir) +
                       " is a mixture, or create it again from the same text"
                 : "; restore the data set, or create it again with `remesh "
                   "data prepare --overwrite --out " +
                       typed_path(dir) + " ...`"));
  };
  if (!parsed.ok()) return advise(parsed.status());
  const data::Index& index = *parsed;
  if (const Status s = data::check_shard_files(dir, index); !s.ok())
    return advise(s);
  int64_t least = index.train_tokens();
  // Each member is validated by itself: whether the largest can be counts.
  int64_t val = index.members.empty() ? index.val_tokens() : 0;
  for (const data::MemberEntry& m : index.members) {
    if (m.weight > 0) least = std::min(least, m.train_tokens);
    val = std::max(val, m.val_tokens);
  }
  return jobfile::DataInfo{.vocab_size = index.vocab_size,
                           .train_tokens = index.train_tokens(),
                           .val_tokens = val,
                           .least_train_tokens = least,
                           .largest_token = index.largest_token};
}

Result<pb::Job> job_of_run(FileSystem& fs, const std::string& run) {
  const std::string path = job_path(run);
  ASSIGN_OR_RETURN(const std::string text,
                   remesh::read_file(fs, path, kMaxJobBytes));
  return resolve_text(text, path, run);
}

Result<std::string> base_fingerprint(FileSystem& fs, const pb::Job& job) {
  if (job.lora().rank() == 0) return std::string();
  const std::string& place = jobfile::init_path(job.model());
  ASSIGN_OR_RETURN(const auto base, huggingface::WeightSource::open(fs, place));
  return base.check_base(place, job.lora().base_fingerprint(), [] {});
}

Status choose_init(FileSystem& fs, pb::Job* job) {
  pb::Model& m = *job->mutable_model();
  if (m.init_from().empty() ||
      (jobfile::has_every_size(m) && !fs.exists(m.init_from())))
    return ok_status();
  RETURN_IF_ERROR(choose_checkpoint(fs, m));
  const auto base = base_fingerprint(fs, *job);
  if (!base.ok()) return base.status().with_context("model.init_from");
  if (!base->empty()) job->mutable_lora()->set_base_fingerprint(*base);
  return ok_status();
}

Result<pb::Job> load_resolved(const JobSource& source, const std::string& run) {
  pb::Job base;
  bool is_new = true;
  if (!run.empty()) {
    Result<pb::Job> held = job_of_run(*posix_file_system(), run);
    if (held.ok()) {
      base = jobfile::without_derived(std::move(*held));
      is_new = false;
    } else if (held.status().code() != Code::kNotFound || source.file.empty()) {
      return held.status();
    }
  }
  ASSIGN_OR_RETURN(pb::Job job,
                   jobfile::load_job(source.file, source.set, base));
  if (!is_new) keep_open_sizes(base.model(), job.mutable_model());
  if (is_new && job.data().sequence_offset() < 0)
    return invalid_argument(fmt::format(
        "data.sequence_offset = {}: must be at least 0 in a new run",
        job.data().sequence_offset()));
  if (is_new) RETURN_IF_ERROR(choose_init(*posix_file_system(), &job));
  return resolve_with_data(job);
}

std::vector<std::string> forbidden_differences(
    const pb::Job& run, const pb::Job& given,
    const std::vector<std::string>& set) {
  const bool length = length_follows_steps(run) && length_follows_steps(given);
  const bool warmup = warmup_follows_steps(run) && warmup_follows_steps(given);
  const std::set<std::string> asked = keys_of(set);
  std::vector<std::string> out;
  for (const jobfile::Difference& d : jobfile::differences(run, given)) {
    if (free_to_change(d.key, length, warmup)) continue;
    const bool may = free_on_request(d.key);
    if (may && asked.contains(d.key)) continue;
    out.push_back(fmt::format("{}: the run has {}, given is {}", d.key, d.first,
                              d.second));
    if (may)
      out.back() +=
          fmt::format(" (to change it for the rest of the run: --set {}={})",
                      d.key, d.second);
  }
  return out;
}

int64_t last_finished_step(const std::string& run) {
  const std::vector<pb::StepMetrics> recent = recent_metrics(run);
  return recent.empty() ? 0 : recent.back().step();
}

std::vector<pb::StepMetrics> recent_metrics(const std::string& run) {
  std::vector<pb::StepMetrics> out;
  for (const std::string& line : read_last_lines(metrics_path(run)))
    if (auto m = parse_metrics_line(line); m.ok()) out.push_back(*std::move(m));
  return out;
}

Result<OpenedJob> open_job(const JobSource& source, const std::string& run_dir,
                           bool resume, double unix_s) {
  OpenedJob out;
  if (source.file.empty()) {
    ASSIGN_OR_RETURN(out.run, find_run(run_dir));
  } else {
    ASSIGN_OR_RETURN(const pb::Job given,
                     jobfile::load_job(source.file, source.set));
    out.made = run_dir.empty() && !resume;
    // A directory is created for a job that is sound.
    if (out.made) RETURN_IF_ERROR(load_resolved(source).status());
    ASSIGN_OR_RETURN(out.run,
                     choose_run(given.job().dump_folder(), given.job().name(),
                                run_dir, resume, unix_s));
  }
  // The job.toml of a folder that is no run is not the job of one.
  ASSIGN_OR_RETURN(out.job,
                   load_resolved(source, is_run(out.run) ? out.run : ""));
  return out;
}

Status check_unedited(FileSystem& fs, const std::string& run,
                      const pb::Durable& journal) {
  return check_identity(fs, is_unedited(fs, run), run, job_of_run(fs, run),
                        journal);
}

Result<JobChange> check_job(FileSystem& fs, const Continuation& with,
                            const std::string& run,
                            const pb::Durable* journal) {
  Result<pb::Job> held = job_of_run(fs, run);
  if (!held.ok() && held.status().code() != Code::kNotFound)
    return held.status();
  std::vector<std::string> asked = with.set;
  if (journal != nullptr) {
    const bool accept = with.accept_edits || is_unedited(fs, run);
    RETURN_IF_ERROR(check_identity(fs, accept, run, held, *journal));
    // Whoever accepts an edit asks for it.
    if (journal->has_job() && held.ok() && accept)
      for (const auto& d : jobfile::differences(journal->job(), *held))
        asked.push_back(d.key + "=" + d.second);
    if (journal->has_job()) held = journal->job();
  }
  const pb::Job& job = with.job;
  std::vector<std::string> forbidden;
  if (held.ok()) forbidden = forbidden_differences(*held, job, asked);
  if (!forbidden.empty())
    return invalid_argument(
        fmt::format("{} contains a run with other values; restore them, or "
                    "start a new run with another --run-dir:\n  {}",
                    run, join(forbidden, "\n  ")));
  const NewestState newest = newest_state(fs, run, job, journal);
  RETURN_IF_ERROR(check_steps(job, run, newest));
  const bool trained = newest.step > 0 && journal != nullptr;
  RETURN_IF_ERROR(
      check_data(fs, job, run, trained ? journal->assignment().data_id() : ""));
  // Ranks report a model that is missing: it need not be on this host.
  if (const Status base = base_fingerprint(fs, job).status();
      base.code() == Code::kCorrupt)
    return base;
  if (!held.ok()) return JobChange{};
  JobChange change{.keys = jobfile::changes_text(*held, job)};
  const std::set<std::string> keys = keys_of(asked);
  if (newest.step > 0 && std::none_of(keys.begin(), keys.end(), moves_rate))
    change.learning_rate = learning_rate_text(*held, job, run, newest.step);
  return change;
}

Status write_job(FileSystem& fs, const pb::Job& job, const std::string& run,
                 uint64_t run_id) {
  const std::string path = job_path(run);
  std::string text = jobfile::to_toml(job);
  if (run_id != 0) text += last_line(run_id, text);
  const Result<std::string> before = remesh::read_file(fs, path, kMaxJobBytes);
  if (before.ok() && *before == text) return ok_status();
  return write_file_atomically(fs, path, text);
}

std::vector<pb::EventRecord> events_of(const JobChange& change,
                                       const std::string& run) {
  std::vector<pb::EventRecord> out;
  for (const auto& [kind, text] :
       {std::pair{&events::kJobChanged, change.keys},
        std::pair{&events::kLearningRateChanged, change.learning_rate}}) {
    if (text.empty()) continue;
    pb::EventRecord& e = out.emplace_back();
    e.set_event(kind->name);
    e.set_step(last_finished_step(run));
    e.set_detail(text);
  }
  return out;
}

std::string data_id_of(const pb::Job& job) {
  const auto index = data::read_index(job.data().path());
  return index.ok() ? index->data_id : "";
}

}  // namespace remesh::rundir
