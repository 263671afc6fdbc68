// `remesh run`: starts a coordinator and local workers as children, follows the
// job until it ends, and stops them.
#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "checkpoint/manifest/scan.h"
#include "coordinator/ctl/children.h"
#include "coordinator/ctl/client.h"
#include "coordinator/ctl/detach.h"
#include "coordinator/ctl/follower.h"
#include "coordinator/ctl/screen.h"
#include "coordinator/ctl/summary.h"
#include "coordinator/ctl/supervisor.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/line_file.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "parallel/geometry/layout.h"
#include "proto/base/clock.h"
#include "proto/base/file_system.h"
#include "proto/base/process.h"
#include "proto/base/rng.h"
#include "proto/base/sharing.h"
#include "proto/base/text.h"
#include "proto/wire/loop.h"

namespace remesh::ctl {
namespace {

struct RunOptions {
  std::string job_file;
  std::string run_dir;
  bool resume = false;
  int local_workers = 0;
  int slots_per_worker = 1;
  bool respawn = false;
  bool detach = false;
  bool no_auth = false;
  std::string bind = "tcp://127.0.0.1:0";
  std::string advertise;
  std::vector<std::string> set;
};

std::string last_line_of(const std::string& path) {
  const auto lines = rundir::read_last_lines(path);
  return lines.empty() ? "" : lines.back();
}

// The least number of slots that the job can run on.
int64_t slots_needed(const pb::Job& job) {
  const pb::Parallel& p = job.parallel();
  int64_t ranks = 1;
  for (const int64_t degree :
       {p.data_parallel_degree(), p.tensor_parallel_degree(),
        p.pipeline_parallel_degree(), p.context_parallel_degree()})
    ranks *= std::max<int64_t>(degree, 1);
  int64_t least = job.elastic().layouts().empty() ? ranks : INT64_MAX;
  for (const std::string& text : job.elastic().layouts())
    if (const auto layout = geometry::Layout::parse(text); layout.ok())
      least = std::min<int64_t>(least, layout->world());
  return std::max(least, job.elastic().min_slots());
}

// The least number of local workers that offer them.
int64_t workers_needed(const pb::Job& job, const RunOptions& o) {
  return (slots_needed(job) + o.slots_per_worker - 1) / o.slots_per_worker;
}

// How to get the slots that the job lacks.
std::string slots_hint(const pb::Job& job, const RunOptions& o,
                       const std::string& run_dir) {
  const int64_t needed = slots_needed(job);
  return fmt::format(
      "the job needs {} and waits for workers. To train on this machine, press "
      "Ctrl-C and type: remesh resume {} --local {}; or start workers with: "
      "remesh-worker --connect {} --slots {}",
      plural(needed, "slot"), rundir::short_path(run_dir),
      workers_needed(job, o), run_dir, needed);
}

// The command that continues the run with the same workers, or as many as it
// needs.
std::string resume_command(const pb::Job& job, const RunOptions& o,
                           const std::string& run_dir) {
  std::string out = "remesh resume " + rundir::short_path(run_dir);
  if (o.local_workers > 0)
    out +=
        fmt::format(" --local {}",
                    std::max<int64_t>(o.local_workers, workers_needed(job, o)));
  if (o.slots_per_worker > 1)
    out += fmt::format(" --slots-per-worker {}", o.slots_per_worker);
  if (o.bind != RunOptions().bind) out += " --bind " + o.bind;
  if (!o.advertise.empty()) out += " --advertise " + o.advertise;
  if (o.respawn) out += " --respawn";
  return out;
}

// The shell of the Supervisor: owns the processes, the screen and the clock.
class RunJob {
 public:
  RunJob(const RunOptions& options, pb::Job job, std::string run_dir)
      : options_(options),
        job_(std::move(job)),
        run_dir_(std::move(run_dir)),
        began_(unix_seconds()),
        loop_(Supervisor::kTickMs),
        supervisor_({.local_workers = options.local_workers,
                     .hint = slots_hint(job_, options, run_dir_),
                     .respawn = options.respawn,
                     .logs = rundir::logs_path(run_dir_)}) {}

  Status start() {
    RETURN_IF_ERROR(loop_.watch_signals({SIGINT, SIGTERM, SIGHUP, SIGCHLD},
                                        [this](int s) { on_signal(s); }));
    // A closed pipe is no reason to leave the run unattended.
    ::signal(SIGPIPE, SIG_IGN);
    ASSIGN_OR_RETURN(coordinator_program_,
                     program_beside("remesh-coordinator"));
    if (options_.local_workers > 0) {
      ASSIGN_OR_RETURN(worker_program_, program_beside("remesh-worker"));
    }
    was_run_ = rundir::is_run(run_dir_);
    RETURN_IF_ERROR(rundir::create(run_dir_));
    follower_ = std::make_unique<Follower>(job_, run_dir_, &screen_);
    give(Begin{.lock_holder = rundir::RunLock::holder(run_dir_)});
    return ok_status();
  }

  // `on_listening` is called when the coordinator can be reached.
  int run(std::function<void()> on_listening) {
    on_listening_ = std::move(on_listening);
    loop_.on_tick([this] { tick(); });
    const int code = loop_.run();
    children_.kill_all();
    follower_->poll(monotonic_ms(), unix_seconds());
    screen_.bottom("");
    if (supervisor_.failed_to_start()) {
      tell_failed_start();
      return code;
    }
    summarize(code);
    return code;
  }

 private:
  void tell_failed_start() {
    for (const std::string& line : rundir::read_lines(output_of(kCoordinator)))
      fmt::print(stderr, "{}\n", line);
    if (was_run_) return;
    std::remove(output_of(kCoordinator).c_str());
    rundir::remove_unstarted(*posix_file_system(), run_dir_);
  }

  // ------------------------------------------------------------------ events

  void give(const Event& event) {
    for (const Action& action : supervisor_.on(event, monotonic_ms()))
      std::visit([this](const auto& a) { perform(a); }, action);
  }

  void on_signal(int signal) {
    if (signal == SIGCHLD) return reap();
    give(Interrupt{});
  }

  void tick() {
    reap();
    const int declined = follower_->stops_declined();
    follower_->poll(monotonic_ms(), unix_seconds());
    if (follower_->stops_declined() > declined) give(StopDeclined{});
    if (const auto reply = stopper_.poll()) give(StopAnswered{reply->ok()});
    const auto endpoint = rundir::read_endpoint(run_dir_);
    const bool following = supervisor_.following();
    const bool listens = endpoint.ok() && (following || endpoint.value().pid ==
                                                            coordinator_pid_);
    if (listens && on_listening_) std::exchange(on_listening_, nullptr)();
    give(Tick{
        .coordinator_listens = listens,
        .coordinator_alive = following && rundir::RunLock::holder(run_dir_) > 0,
        .outcome = follower_->outcome(),
        .lacks_slots = follower_->lacks_slots(),
        .goes_on = follower_->goes_on()});
  }

  void reap() {
    for (const Ended& e : children_.reap()) {
      if (e.child < 0) continue;  // an adopted orphan
      give(ChildExited{e, last_line_of(output_of(e.child))});
    }
  }

  // ----------------------------------------------------------------- actions

  void perform(const StartCoordinator& a) {
    std::vector<std::string> argv = {coordinator_program_, "--run-dir",
                                     run_dir_, "--bind", options_.bind};
    if (!options_.job_file.empty()) argv.push_back(options_.job_file);
    if (!options_.advertise.empty()) {
      argv.insert(argv.end(), {"--advertise", options_.advertise});
    }
    if (options_.resume && a.resume) argv.push_back("--resume");
    argv.push_back(options_.no_auth ? "--no-auth" : "--make-keys");
    for (const std::string& s : options_.set) {
      argv.insert(argv.end(), {"--set", s});
    }
    // Errors of an earlier session must not be mistaken for this one's.
    if (a.first) std::remove(output_of(kCoordinator).c_str());
    coordinator_pid_ = start_child(kCoordinator, argv);
  }

  void perform(const StartWorker& a) {
    // The same names after every resume, so that a worker finds the states
    // that its predecessor left in shared memory. Other runs on this host have
    // workers of these names, with scratch folders of their own.
    const std::string name = local_name(a.number);
    std::error_code ignored;
    const std::string run = std::filesystem::canonical(run_dir_, ignored);
    std::vector<std::string> argv = {
        worker_program_,
        "--connect",
        run_dir_,
        "--name",
        name,
        "--scratch-name",
        fmt::format("{}-{:016x}", name, hash64(run)),
        "--log",
        output_of(a.number),
        "--slots",
        fmt::format("{}", options_.slots_per_worker),
        "--job",
        job_.job().name()};
    if (options_.no_auth) argv.push_back("--no-auth");
    start_child(a.number, argv);
  }

  // Returns the pid, 0 if it could not be started.
  int start_child(int child, const std::vector<std::string>& argv) {
    const auto pid = children_.start(child, argv, output_of(child));
    if (pid.ok()) return pid.value();
    give(StartFailed{child, pid.status().message()});
    return 0;
  }

  void perform(const SignalChild& a) { children_.signal(a.child, a.signal); }

  void perform(const KillAll&) { children_.kill_all(); }

  void perform(const SendStop&) {
    pb::Command command;
    command.set_kind(pb::Command::STOP);
    stopper_.send(command);
  }

  void perform(const Greet&) {
    const auto endpoint = rundir::read_endpoint(run_dir_);
    if (!endpoint.ok()) return;
    rundir::point_latest(job_.job().dump_folder(), run_dir_);
    if (supervisor_.following()) find_taken_names();
    perform(Say{fmt::format("run directory {}", run_dir_)});
    perform(Say{fmt::format("to add a worker: remesh-worker --connect {}{}",
                            endpoint.value().host == host_identity()
                                ? run_dir_
                                : endpoint.value().address,
                            options_.no_auth ? " --no-auth" : "")});
  }

  void perform(const Say& a) { follower_->say(a.text, a.tone, unix_seconds()); }
  void perform(const SetNote& a) { follower_->set_note(a.text); }
  void perform(const Exit& a) { loop_.stop(a.code); }

  std::string output_of(int child) const {
    const std::string folder = rundir::logs_path(run_dir_);
    return child == kCoordinator
               ? folder + "/coordinator.out"
               : rundir::worker_log_path(run_dir_, local_name(child));
  }

  // local-1, local-2, ... without those of another `remesh run` in this run.
  std::string local_name(int child) const {
    int number = 0;
    for (int i = 0; i < child; ++i)
      while (taken_.contains(fmt::format("local-{}", ++number))) continue;
    return fmt::format("local-{}", number);
  }

  void find_taken_names() {
    const auto status = send_command(run_dir_, status_request());
    if (!status.ok()) return;
    for (const pb::WorkerStatus& w : status->workers())
      if (w.state() != "dead") taken_.insert(w.name());
  }

  // ---------------------------------------------------------------- the end

  std::string newest_checkpoint() const {
    const auto fs = posix_file_system();
    const auto found = manifest::scan(
        *fs, rundir::checkpoints_path(run_dir_, job_.checkpoint().folder()));
    if (!found.ok()) return "";
    const auto* newest = manifest::choose_newest_valid(found.value());
    return newest == nullptr ? "" : newest->path;
  }

  void summarize(int code) {
    RunSummary s{.resume = resume_command(job_, options_, run_dir_),
                 .run_dir = rundir::short_path(run_dir_),
                 .job = job_};
    s.outcome = code == kExitFailed         ? "failed"
                : supervisor_.interrupted() ? "interrupted"
                                            : follower_->outcome();
    s.began = began_;
    for (const std::string& line :
         rundir::read_lines(rundir::metrics_path(run_dir_))) {
      auto m = rundir::parse_metrics_line(line);
      if (m.ok()) s.metrics.push_back(std::move(*m));
    }
    for (const std::string& line :
         rundir::read_lines(rundir::events_path(run_dir_))) {
      auto e = rundir::parse_event_line(line);
      if (e.ok()) s.events.push_back(std::move(*e));
    }
    const std::string newest = newest_checkpoint();
    s.checkpoint = newest.empty() ? "" : rundir::short_path(newest);
    screen_.line(summary_text(s, screen_.style()));
    if (code != kExitFailed) return;
    std::string reason = supervisor_.reason();
    if (reason.empty()) reason = follower_->reason();
    if (reason.empty()) reason = last_line_of(output_of(kCoordinator));
    fmt::print(stderr, "remesh: {}\n",
               reason.empty() ? "the job failed" : reason);
  }

  RunOptions options_;
  pb::Job job_;
  std::string run_dir_;
  double began_;
  Screen screen_;
  std::function<void()> on_listening_;
  wire::Loop loop_;
  Children children_;
  std::unique_ptr<Follower> follower_;
  std::string coordinator_program_;
  std::string worker_program_;
  Supervisor supervisor_;
  int coordinator_pid_ = 0;
  std::set<std::string> taken_;  // names of workers that others started
  bool was_run_ = false;         // before this program
  Asker stopper_{run_dir_};
};

// What another program that uses the run directory would not agree with.
Status check_run(const RunOptions& o, const rundir::OpenedJob& opened) {
  const std::string& run = opened.run;
  const int holder = rundir::RunLock::holder(run);
  const auto end = rundir::end_of_run(run);
  if (holder == 0 && end && !o.resume)
    return ended(run + ": " + rundir::end_text(*end, run));
  ASSIGN_OR_RETURN(
      const rundir::JobChange change,
      rundir::check_job(*posix_file_system(), opened.job, o.set, run));
  if (holder == 0 || change.keys.empty()) return ok_status();
  return invalid_argument(fmt::format(
      "{}: a coordinator (pid {}) runs this job with other settings ({}); stop "
      "it first (remesh stop {}), or give another --run-dir",
      run, holder, change.keys, rundir::short_path(run)));
}

std::string output_path(const std::string& run) {
  return rundir::logs_path(run) + "/run.out";
}

Result<Detached> detach(const std::string& run) {
  RETURN_IF_ERROR(posix_file_system()->create_dirs(rundir::logs_path(run)));
  return Detached::start(output_path(run));
}

void print_detached(const std::string& run, int code, pid_t child) {
  const std::string name = rundir::short_path(run);
  if (code == kExitOk) {
    fmt::print(
        "{} continues in the background, pid {}\n\n"
        "  remesh status {} -w\n  tail -f {}\n  remesh stop {}\n",
        name, child, name, output_path(name), name);
    return;
  }
  for (const std::string& line : rundir::read_lines(output_path(run)))
    fmt::print(stderr, "{}\n", line);
  if (rundir::is_run(run)) return;
  std::remove(output_path(run).c_str());
  rundir::remove_unstarted(*posix_file_system(), run);
}

Result<int> run_job(const RunOptions& options) {
  RETURN_IF_ERROR(share_new_files(/*group=*/""));
  ASSIGN_OR_RETURN(
      rundir::OpenedJob opened,
      rundir::open_job({options.job_file, options.set}, options.run_dir,
                       options.resume, unix_seconds()));
  RETURN_IF_ERROR(check_run(options, opened));
  std::optional<Detached> detached;
  if (options.detach) {
    ASSIGN_OR_RETURN(detached, detach(opened.run));
    if (const auto code = detached->exit_code_of_parent()) {
      print_detached(opened.run, *code, detached->child());
      return *code;
    }
  }
  RunJob run(options, std::move(opened.job), std::move(opened.run));
  RETURN_IF_ERROR(run.start());
  return run.run([&] {
    if (detached) detached->say_running();
  });
}

void add_run_options(CLI::App* c, RunOptions* o) {
  c->add_option("--local", o->local_workers,
                "Number of workers to start on this machine")
      ->check(integer_in(0, 4096));
  c->add_option("--slots-per-worker", o->slots_per_worker,
                "Slots (ranks) that each local worker offers")
      ->check(integer_in(1, 4096))
      ->capture_default_str();
  c->add_option("--bind", o->bind,
                "Address the coordinator listens on; use tcp://0.0.0.0:5710 "
                "for workers on other machines, ipc:///PATH for no port")
      ->capture_default_str();
  c->add_option("--advertise", o->advertise,
                "HOST or HOST:PORT that workers connect to, if it differs from "
                "--bind");
  c->add_flag("--respawn", o->respawn, "Restart local workers that die");
  c->add_flag("--no-auth", o->no_auth,
              "Without keys: whoever reaches the coordinator's port controls "
              "the job");
  c->add_flag("--detach", o->detach,
              "Continue in the background once the run has started; what it "
              "prints goes to logs/run.out of the run");
}

void add_resume_verb(CLI::App* app, int* code) {
  auto o = std::make_shared<RunOptions>();
  o->resume = true;
  CLI::App* c =
      app->add_subcommand("resume", "Continue a run with its own settings");
  add_run_option(c, &o->run_dir);
  add_set_option(c, &o->set);
  add_run_options(c, o.get());
  c->footer(R"(
Examples:
  remesh resume --local 2
  remesh resume runs/books --local 2 --set train.steps=2000
  remesh resume runs/books --local 2 --set optimizer.lr=1e-4

The run continues from its newest state, with any number of workers. Model, data,
seed and batch stay as they are; the learning rate and its schedule change only
with --set. If train.steps changes, schedule.total_steps follows it unless it was
set apart.)");
  c->callback([o, code] { *code = exit_code(run_job(*o)); });
}

}  // namespace

void add_run_verb(CLI::App* app, int* code) {
  auto o = std::make_shared<RunOptions>();
  CLI::App* c = app->add_subcommand("run", "Train: start a job and follow it");
  add_job_options(c, &o->job_file, &o->set);
  c->add_flag("--resume", o->resume,
              "Continue the newest run of this job (or --run-dir), see remesh "
              "resume. Keys that JOB does not give stay as they are");
  c->add_option("--run-dir", o->run_dir,
                "Run directory. Default: a new one in job.dump_folder");
  add_run_options(c, o.get());
  c->footer(R"(
Examples:
  remesh run job.toml --local 2
  remesh run job.toml --local 2 --set train.steps=500 --set optimizer.lr=3e-4
  remesh run job.toml --local 4 --resume
  remesh run job.toml --bind tcp://0.0.0.0:5710
      starts only the coordinator; start a worker on each machine with
      remesh-worker --connect tcp://HOST:5710 --slots N

Workers can join and leave during the run: remesh-worker --connect RUN.
Ctrl-C saves and stops; a second Ctrl-C kills immediately. Closing the terminal
counts as Ctrl-C, unless the run was started with --detach.)");
  c->callback([o, code] { *code = exit_code(run_job(*o)); });
  add_resume_verb(app, code);
}

}  // namespace remesh::ctl
