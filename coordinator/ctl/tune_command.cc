// remesh tune: measures short runs of a job with different settings, chosen by
// the planner and by what was measured, and names the fastest.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/file.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "coordinator/core/job_shape.h"
#include "coordinator/ctl/screen.h"
#include "coordinator/ctl/tune_trial.h"
#include "coordinator/ctl/tune_view.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/line_file.h"
#include "coordinator/rundir/local_core.h"
#include "coordinator/rundir/run_dir.h"
#include "parallel/jobfile/jobfile.h"
#include "parallel/planner/local.h"
#include "proto/base/clock.h"
#include "proto/base/file_system.h"
#include "proto/base/machine.h"
#include "proto/base/process.h"
#include "proto/base/rng.h"
#include "proto/base/sharing.h"

namespace remesh::ctl {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct TuneOptions {
  std::string job_file, out, html, launch;
  std::vector<std::string> set, fixed;
  int local_workers = 1, slots_per_worker = 1;
  int hosts = 1, cores = 0;  // of each host; 0: as here
  double memory_gib = 0;     // 0: as here
  int trials = 30, steps = 8, silence_s = 300;
  bool every = false, json = false;
};

// How often SIGINT, SIGTERM or SIGHUP came. Signals that come together are one,
// and what was ignored at the start stays ignored, as in `remesh run`.
std::atomic<int> interrupts = 0;
std::atomic<int64_t> interrupted_ms = 0;

void on_interrupt(int) {
  constexpr int64_t kTogetherMs = 1000;
  const int64_t now = monotonic_ms();
  if (interrupts == 0 || now - interrupted_ms > kTogetherMs) ++interrupts;
  interrupted_ms = now;
}

void catch_interrupts() {
  struct sigaction action {
  }, before{};
  action.sa_handler = on_interrupt;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);
  }
}

// With --launch the workers are as the options describe, otherwise here.
std::vector<planner::WorkerSlots> workers_of(const TuneOptions& o) {
  const bool here = o.launch.empty();
  std::vector<planner::WorkerSlots> out;
  for (int h = 0; h < (here ? 1 : o.hosts); ++h)
    for (int w = 0; w < o.local_workers; ++w)
      out.push_back(
          {.worker = fmt::format("host{}-{}", h, w),
           .host = fmt::format("host{}", h),
           .slots = o.slots_per_worker,
           .cores = o.cores > 0 ? o.cores : usable_cores(),
           .memory_bytes =
               o.memory_gib > 0
                   ? static_cast<uint64_t>(o.memory_gib * (uint64_t{1} << 30))
                   : usable_memory()});
  return out;
}

class Tuning {
 public:
  Tuning(const TuneOptions& options, pb::Job job, tune::Space space)
      : options_(options),
        job_(std::move(job)),
        space_(std::move(space)),
        tuner_(space_.candidates) {}

  Result<int> run() {
    if (options_.job_file == jobfile::kStandardInput)
      return invalid_argument(
          "-: each trial reads the job; give a file, not the standard input");
    out_ = options_.out.empty()
               ? job_.job().dump_folder() + "/tune-" + job_.job().name()
               : absolute_path(options_.out);
    RETURN_IF_ERROR(share_new_files(/*group=*/""));
    std::error_code ec;
    fs::create_directories(out_, ec);
    if (ec) return io_error(out_ + ": " + ec.message());
    RETURN_IF_ERROR(open_log());
    catch_interrupts();
    say(fmt::format(
        "{} settings fit, {} do not fit into memory{}; trials in {}",
        space_.settings.size(), space_.too_large,
        space_.too_slow == 0
            ? ""
            : fmt::format(", the {} slowest by the cost model are "
                          "left out",
                          space_.too_slow),
        rundir::short_path(out_)));
    before_ = tuner_.trials().size();
    for (size_t i = 0; i < before_; ++i) say_trial(i);
    while (interrupts == 0) {
      const auto next = choose();
      if (!next) break;
      RETURN_IF_ERROR(try_one(*next));
    }
    screen_.bottom("");
    return report();
  }

 private:
  // ------------------------------------------------------------------ the log

  // What the trials of one log have in common.
  std::string identity() const {
    std::string all = jobfile::to_toml(job_) + options_.launch;
    for (const planner::WorkerSlots& w : workers_of(options_))
      all += fmt::format("{} {} {} {} ", w.worker, w.host, w.slots, w.cores);
    return fmt::format("{:016x}",
                       hash64(all + fmt::format("{}", options_.steps)));
  }

  Status open_log() {
    const std::string path = out_ + "/trials.jsonl";
    // Held to the end of the process.
    const int lock =
        open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (lock < 0) return io_error(path + ": " + std::strerror(errno));
    if (flock(lock, LOCK_EX | LOCK_NB) != 0)
      return unavailable(path + ": another `remesh tune` is writing it");
    ASSIGN_OR_RETURN(log_, rundir::LineFile::open(path, [](auto line) {
                       return Json::accept(line);
                     }));
    const std::string first = Json{{"tuning", identity()}}.dump();
    const std::vector<std::string> lines = rundir::read_lines(path);
    if (lines.empty()) return log_->append(first + "\n");
    if (lines[0] != first)
      return invalid_argument(
          path +
          ": has trials of another job, other hosts or other --steps; give "
          "another --out, or remove it");
    for (size_t i = 1; i < lines.size(); ++i)
      if (!take(Json::parse(lines[i], nullptr, /*allow_exceptions=*/false)))
        return corrupt(
            fmt::format("{}:{}: is not a trial; remove the line", path, i + 1));
    return ok_status();
  }

  // False if it is none. A setting that is no longer tried, because of --fix,
  // does not count.
  bool take(const Json& line) {
    if (!line.is_object() || !line.contains("set") || !line["set"].is_array())
      return false;
    std::optional<double> step_s;
    if (line.contains("step_s")) {
      if (!line["step_s"].is_number() || !(line["step_s"].get<double>() > 0))
        return false;
      step_s = line["step_s"].get<double>();
    } else if (!line.contains("error") || !line["error"].is_string()) {
      return false;
    }
    for (size_t i = 0; i < space_.settings.size(); ++i) {
      if (Json(space_.settings[i].overrides()) != line["set"]) continue;
      tuner_.add({i, step_s});
      errors_.push_back(step_s ? "" : line["error"].get<std::string>());
    }
    return true;
  }

  // ------------------------------------------------------------------- trials

  std::optional<size_t> choose() const {
    const auto tried = [&](size_t i) {
      for (const tune::Trial& t : tuner_.trials())
        if (t.candidate == i) return true;
      return false;
    };
    if (!options_.every &&
        tuner_.trials().size() >= static_cast<size_t>(options_.trials))
      return std::nullopt;
    if (!tried(space_.own)) return space_.own;
    if (!options_.every) return tuner_.next();
    for (size_t i = 0; i < space_.candidates.size(); ++i)
      if (!tried(i)) return i;
    return std::nullopt;
  }

  Status try_one(size_t candidate) {
    const std::string name =
        fmt::format("{}/trial-{:03}", out_, tuner_.trials().size() + 1);
    std::error_code ec;
    fs::remove_all(name, ec);
    auto prepared = prepare(candidate, name);
    // A setting that the job does not admit is a trial that failed.
    if (!prepared.ok() && prepared.status().code() == Code::kInvalidArgument)
      return note(candidate, {.error = prepared.status().message()}, name);
    ASSIGN_OR_RETURN(TrialOptions trial, std::move(prepared));
    if (const auto best = tuner_.best(); best && !options_.every)
      trial.best_s = *best->step_s;
    show(candidate, 0);
    const TrialResult result = run_trial(
        trial, [&](int64_t step) { show(candidate, step); },
        [] { return interrupts.load(); });
    if (result.interrupted) {
      fs::remove_all(name, ec);
      return ok_status();
    }
    return note(candidate, result, name);
  }

  Status note(size_t candidate, const TrialResult& result,
              const std::string& name) {
    std::error_code ec;
    Json line{{"set", space_.settings[candidate].overrides()},
              {"predicted_s", space_.candidates[candidate].predicted_s}};
    if (result.step_s) {
      line["step_s"] = *result.step_s;
      fs::remove_all(name, ec);  // of a failure, the logs stay
    } else {
      line["error"] = result.error;
    }
    RETURN_IF_ERROR(log_->append(
        line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"));
    tuner_.add({candidate, result.step_s});
    errors_.push_back(result.error);
    say_trial(tuner_.trials().size() - 1);
    return ok_status();
  }

  // Writes the job of the trial.
  Result<TrialOptions> prepare(size_t candidate, const std::string& run_dir) {
    rundir::JobSource source{.file = options_.job_file, .set = options_.set};
    for (const std::string& s : space_.settings[candidate].overrides())
      source.set.push_back(s);
    source.set.push_back(fmt::format("train.steps={}", options_.steps));
    source.set.push_back("job.dump_folder=" + out_);  // for its link `latest`
    for (const char* s :
         {"train.eval_every=0", "train.eval_sequences=0", "train.log_every=1",
          "schedule.warmup_steps=0", "checkpoint.interval=0",
          "checkpoint.folder=checkpoints", "profile.enable=false",
          "elastic.min_slots=1"})
      source.set.emplace_back(s);
    ASSIGN_OR_RETURN(const pb::Job job, rundir::load_resolved(source));
    const std::string file = run_dir + ".toml";
    RETURN_IF_ERROR(write_file_atomically(*posix_file_system(), file,
                                          jobfile::to_toml(job)));
    ASSIGN_OR_RETURN(const std::string remesh, program_beside("remesh"));
    TrialOptions out{.run_dir = run_dir,
                     .stop = {remesh, "stop", run_dir},
                     .silence_s = options_.silence_s};
    if (options_.launch.empty())
      out.argv = {remesh,
                  "run",
                  file,
                  "--run-dir",
                  run_dir,
                  "--local",
                  std::to_string(options_.local_workers),
                  "--slots-per-worker",
                  std::to_string(options_.slots_per_worker)};
    else
      out.argv = {"/bin/sh", "-c", options_.launch, "sh", file, run_dir};
    out.queued = !options_.launch.empty();
    return out;
  }

  // ------------------------------------------------------------------- output

  TuneReport facts() const {
    return {space_, tuner_, job_, errors_, options_.job_file};
  }

  void say(const std::string& text) {
    if (!options_.json) screen_.line(text);
  }
  void say_trial(size_t i) {
    say(fmt::format("{:3}  {}", i + 1, trial_text(facts(), i)));
  }

  void show(size_t candidate, int64_t step) {
    const size_t trials = tuner_.trials().size();
    const size_t all = options_.every ? space_.settings.size()
                                      : static_cast<size_t>(options_.trials);
    const auto steps_of = [&](size_t n) {
      return static_cast<int64_t>(n) * options_.steps;
    };
    const auto best = tuner_.best();
    const std::string text = fmt::format(
        "{}  trial {} of at most {}{}  {}",
        tune_progress(steps_of(before_), steps_of(trials) + step, steps_of(all),
                      static_cast<double>(monotonic_ms() - began_ms_) / 1e3),
        trials + 1, all,
        best ? fmt::format("  best {:.3f} s", *best->step_s) : "",
        space_.settings[candidate].text());
    screen_.resize();
    screen_.bottom(
        text.substr(0, static_cast<size_t>(screen_.style().width - 1)));
  }

  Result<int> report() {
    fmt::print("{}",
               options_.json ? tune_json(facts()) : "\n" + tune_text(facts()));
    if (!options_.html.empty() && tuner_.best())
      RETURN_IF_ERROR(
          write_output(options_.html, study_page(tune_charts(facts()))));
    if (interrupts > 0 && !options_.json)
      fmt::print("interrupted; the same command continues\n");
    if (interrupts > 0) return kExitInterrupted;
    return tuner_.best() ? kExitOk : kExitFailed;
  }

  const TuneOptions& options_;
  const pb::Job job_;
  const tune::Space space_;
  tune::Tuner tuner_;
  std::vector<std::string> errors_;
  std::string out_;
  std::unique_ptr<rundir::LineFile> log_;
  size_t before_ = 0;  // trials of earlier commands
  const int64_t began_ms_ = monotonic_ms();
  Screen screen_;
};

Result<int> tune(const TuneOptions& o) {
  ASSIGN_OR_RETURN(pb::Job job,
                   rundir::load_resolved({.file = o.job_file, .set = o.set}));
  tune::SpaceRequest request{
      .place = core::placement_request(job, core::shape_of(job)),
      .threads = static_cast<int>(job.train().threads()),
      .fixed = {o.fixed.begin(), o.fixed.end()}};
  ASSIGN_OR_RETURN(request.place.core, rundir::local_core());
  request.place.workers = workers_of(o);
  if (o.launch.empty())
    request.place.shape->bf16 =
        request.place.shape->bf16 && processor_has_bf16();
  planner::match_hosts(&request.place);
  if (o.every) request.most = std::numeric_limits<size_t>::max();
  ASSIGN_OR_RETURN(tune::Space space, tune::make_space(request));
  return Tuning(o, std::move(job), std::move(space)).run();
}

}  // namespace

void add_tune_verb(CLI::App* app, int* code) {
  auto o = std::make_shared<TuneOptions>();
  CLI::App* c = app->add_subcommand(
      "tune", "Find the fastest settings for a job by short runs");
  add_job_options(c, &o->job_file, &o->set);
  const auto count = [&](const char* name, int& value, const char* help,
                         int least, int most) {
    return c->add_option(name, value, help)
        ->check(integer_in(least, most))
        ->capture_default_str();
  };
  count("--local", o->local_workers, "Workers of each trial, on this machine",
        1, 4096);
  count("--slots-per-worker", o->slots_per_worker,
        "Slots (ranks) that each of them offers", 1, 4096);
  count("--trials", o->trials, "Trials at most", 1, 100'000);
  count("--steps", o->steps,
        "Steps of a trial; the median after the first two counts", 4, 100'000);
  count("--silence", o->silence_s,
        "Seconds without a step, once the run has begun, after which a trial "
        "has failed",
        1, 86'400);
  c->add_option("--fix", o->fixed,
                "Do not vary this; repeatable: ranks, tp, pp, cp, micro-batch, "
                "recompute, zero, threads")
      ->allow_extra_args(false);
  c->add_flag("--every", o->every, "Try every setting, however many there are");
  c->add_option("--out", o->out,
                "Folder of the trials, with which the same command continues. "
                "Default: tune-NAME in job.dump_folder");
  CLI::Option* launch = c->add_option(
      "--launch", o->launch,
      "Shell command that runs the job file $1 in the run directory $2 to its "
      "end, on other hosts; --hosts, --cores and --memory-gib describe them");
  count("--hosts", o->hosts, "Number of identical hosts", 1, 1 << 20)
      ->needs(launch);
  c->add_option("--cores", o->cores, "Cores of each host. Default: as here")
      ->check(integer_in(1, 1 << 16))
      ->needs(launch);
  c->add_option("--memory-gib", o->memory_gib,
                "Memory of each host. Default: as here")
      ->check(number_in(1e-3, 1e9))
      ->needs(launch);
  c->add_option("--html", o->html, "Also write a page with charts");
  add_json_option(c, &o->json);
  c->footer(R"(
The first trial has the job's own settings; each next one is that with the
largest expected improvement. Ends after --trials, or when no setting is
expected to be faster by 0.3 %. Ctrl-C keeps what was measured; a second one
kills the trial, whose state then stays in memory for ten minutes.

Examples:
  remesh tune job.toml --local 4
  remesh tune job.toml --local 2 --fix threads --fix zero --html tune.html
  remesh tune job.toml --hosts 4 --slots-per-worker 8 --cores 64 --launch \
    'REMESH_RUN_DIR=$2 sbatch --wait --nodes 4 remesh.sbatch "$1" 8')");
  c->callback([o, code] { *code = exit_code(tune(*o)); });
}

}  // namespace remesh::ctl
