// `remesh run`: starts a coordinator and local workers as children, follows the
// job until it ends, and stops them.
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "checkpoint/manifest/manifest.h"
#include "coordinator/ctl/children.h"
#include "coordinator/ctl/client.h"
#include "coordinator/ctl/detach.h"
#include "coordinator/ctl/follower.h"
#include "coordinator/ctl/preflight.h"
#include "coordinator/ctl/run_options.h"
#include "coordinator/ctl/scratch_names.h"
#include "coordinator/ctl/screen.h"
#include "coordinator/ctl/summary.h"
#include "coordinator/ctl/supervisor.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "coordinator/server/journal.h"
#include "proto/base/clock.h"
#include "proto/base/file_system.h"
#include "proto/base/process.h"
#include "proto/base/sharing.h"
#include "proto/base/text.h"
#include "proto/rundir/file_tail.h"
#include "proto/wire/loop.h"

namespace remesh::ctl {
namespace {

void print_lines(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) print_error(line + "\n");
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
                     .stop_timeout_ms = 1000 * options.stop_timeout_s,
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
      RETURN_IF_ERROR(program_beside("remesh-trainer").status());
    }
    follower_ = std::make_unique<Follower>(job_, run_dir_, &screen_);
    ASSIGN_OR_RETURN(const int holder,
                     running_coordinator({job_, options_.set}, run_dir_));
    rundir::NewestState left;
    if (holder == 0 && options_.local_workers > 0)
      left = newest_state_of(run_dir_);
    scratch_names_ = scratch_names(options_.local_workers, run_dir_,
                                   absolute_path(scratch_root()), left.folders);
    dispatch(Begin{.lock_holder = holder});
    return ok_status();
  }

  // `on_listening` is called when the coordinator can be reached; its argument
  // says whether it is a child of this process.
  int run(std::function<void(bool)> on_listening) {
    on_listening_ = std::move(on_listening);
    loop_.on_tick([this] { tick(); });
    const int code = loop_.run();
    if (const auto left = children_.kill_all(); !left.empty())
      screen_.line(fmt::format("cannot be killed, and stays: process {}",
                               fmt::join(left, ", ")));
    follower_->poll(monotonic_ms(), unix_seconds());
    screen_.bottom("");
    if (!supervisor_.failed_to_start())
      summarize(code);
    else
      print_lines(coordinator_output_.lines());
    return code;
  }

 private:
  // ------------------------------------------------------------------ events

  void dispatch(const Event& event) {
    for (const Action& action : supervisor_.on(event, monotonic_ms()))
      std::visit([this](const auto& a) { perform(a); }, action);
  }

  void on_signal(int signal) {
    if (signal == SIGCHLD) return reap();
    dispatch(Interrupt{});
  }

  void tick() {
    reap();
    follower_->poll(monotonic_ms(), unix_seconds());
    if (follower_->stop_declined()) dispatch(StopDeclined{});
    if (const auto reply = stopper_.poll()) {
      if (reply->ok()) follower_->await_stop();
      dispatch(StopAnswered{
          reply->ok(),
          reply->code() == code_name(Code::kExhausted) ? reply->error() : ""});
    }
    const auto endpoint = rundir::read_endpoint(run_dir_);
    const bool following = supervisor_.following();
    const bool listens =
        endpoint.ok() &&
        (following || rundir::is_of_process(*endpoint, coordinator_pid_));
    if (listens && on_listening_)
      std::exchange(on_listening_, nullptr)(!following);
    dispatch(Tick{
        .coordinator_listens = listens,
        .coordinator_alive = following && rundir::RunLock::holder(run_dir_) > 0,
        .outcome = follower_->outcome(),
        .lacks_slots = follower_->lacks_slots(),
        .has_workers = follower_->has_workers(),
        .trained = follower_->saw_step(),
        .run_dir_gone = follower_->run_dir_gone(),
        .continued = follower_->continued()});
  }

  void reap() {
    for (const Ended& e : children_.reap()) {
      if (e.child < 0) continue;  // an adopted orphan
      dispatch(ChildExited{e, rundir::read_last_line(output_of(e.child))});
    }
  }

  // ----------------------------------------------------------------- actions

  void perform(const StartCoordinator& a) {
    std::vector<std::string> argv = {coordinator_program_, "--run-dir",
                                     run_dir_, "--bind", options_.bind};
    // Later the run has its job, and the file may have been edited for another.
    const bool has_job = !a.resume;
    if (!options_.job_file.empty() && !has_job)
      argv.push_back(options_.job_file);
    if (!options_.advertise.empty())
      argv.insert(argv.end(), {"--advertise", options_.advertise});
    if (options_.resume && a.resume) argv.push_back("--resume");
    if (options_.accept_edits && !has_job) argv.push_back("--accept-edits");
    argv.push_back(options_.no_auth ? "--no-auth" : "--make-keys");
    if (!has_job)
      for (const std::string& s : options_.set)
        argv.insert(argv.end(), {"--set", s});
    coordinator_output_.clear();
    const bool piped = options_.job_file == jobfile::kStandardInput && !has_job;
    coordinator_pid_ = start_child(kCoordinator, argv,
                                   piped ? "/proc/self/fd/0" : "/dev/null");
  }

  void perform(const StartWorker& a) {
    const LocalWorker& worker =
        workers_.try_emplace(a.number, local_worker(a.number)).first->second;
    std::vector<std::string> argv = {
        worker_program_,
        "--connect",
        run_dir_,
        "--name",
        worker.name,
        "--scratch-name",
        worker.scratch,
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
  int start_child(int child, const std::vector<std::string>& argv,
                  const std::string& input = "/dev/null") {
    const auto pid = children_.start(child, argv, output_of(child), input);
    if (pid.ok()) return pid.value();
    dispatch(StartFailed{child, pid.status().message()});
    return 0;
  }

  void perform(const SignalChild& a) { children_.signal(a.child, a.signal); }

  void perform(const KillAll&) { children_.kill_all(); }

  void perform(const SendStop&) {
    stopper_.send(command_of(pb::Command::STOP));
  }

  void perform(const PrintWelcome&) {
    const auto endpoint = rundir::read_endpoint(run_dir_);
    if (!endpoint.ok()) return;
    rundir::point_latest(job_.job().dump_folder(), run_dir_);
    perform(Say{fmt::format("run directory {}", run_dir_)});
    perform(
        Say{fmt::format("to add a worker: remesh-worker --connect {}{}",
                        rundir::is_here(*endpoint) ? shell_quoted(run_dir_)
                                                   : endpoint.value().address,
                        options_.no_auth ? " --no-auth" : "")});
  }

  void perform(const Say& a) { follower_->say(a.text, a.tone, unix_seconds()); }
  void perform(const SetNote& a) { follower_->set_note(a.text); }
  void perform(const Exit& a) { loop_.stop(a.code); }

  std::string output_of(int child) const {
    return child == kCoordinator
               ? coordinator_output_.path()
               : rundir::worker_log_path(run_dir_, workers_.at(child).name);
  }

  struct LocalWorker {
    std::string name, scratch;
  };
  // Beside the workers of another `remesh run`, names that nobody else has.
  LocalWorker local_worker(int child) const {
    if (!supervisor_.following())
      return {fmt::format("local-{}", child), scratch_names_.at(child - 1)};
    const std::string name =
        fmt::format("{}-{}-{}", host_name(), getpid(), child);
    return {name, scratch_name(name, run_dir_)};
  }

  // ---------------------------------------------------------------- the end

  void summarize(int code) {
    if (supervisor_.following() && !has_ended(follower_->outcome()))
      return screen_.line("still running: remesh status " +
                          rundir::typed_path(run_dir_));
    RunSummary s{.resume = resume_command(job_, options_, run_dir_),
                 .run_dir = rundir::short_path(run_dir_),
                 .job = job_};
    // Also for want of a coordinator that takes the job file.
    const bool failed = code == kExitFailed || code == kExitUsage;
    s.outcome = failed                      ? pb::JobStatus::FAILED
                : supervisor_.interrupted() ? pb::JobStatus::UNKNOWN
                                            : follower_->outcome();
    s.began = began_;
    // Of a run of any length, a line at a time.
    std::ifstream metrics(rundir::metrics_path(run_dir_));
    for (std::string line; std::getline(metrics, line);)
      if (const auto m = rundir::parse_metrics_line(line); m.ok()) s.add(*m);
    std::ifstream events(rundir::events_path(run_dir_));
    for (std::string line; std::getline(events, line);)
      if (auto e = rundir::parse_event_line(line); e.ok()) s.add(*std::move(e));
    const rundir::NewestState newest = newest_state_of(run_dir_);
    if (newest.checkpoint_step > 0)
      s.checkpoint = rundir::short_path(path_join(
          rundir::checkpoints_path(run_dir_, job_.checkpoint().folder()),
          manifest::step_name(newest.checkpoint_step)));
    if (newest.source == pb::Source::MEMORY)
      s.in_memory = rundir::state_text(newest);
    // Without its folder there is nothing to sum up or to continue.
    if (path_exists(run_dir_)) screen_.line(summary_text(s, screen_.style()));
    if (!failed) return;
    std::string reason = supervisor_.reason();
    if (reason.empty()) reason = follower_->reason();
    if (reason.empty())
      reason = rundir::read_last_line(coordinator_output_.path());
    print_error(fmt::format("remesh: {}\n",
                            reason.empty() ? "the job failed" : reason));
  }

  RunOptions options_;
  pb::Job job_;
  std::string run_dir_;
  double began_;
  Screen screen_;
  std::function<void(bool)> on_listening_;
  wire::Loop loop_;
  Children children_;
  Output coordinator_output_;
  std::unique_ptr<Follower> follower_;
  std::string coordinator_program_;
  std::string worker_program_;
  Supervisor supervisor_;
  int coordinator_pid_ = 0;
  std::vector<std::string> scratch_names_;
  std::map<int, LocalWorker> workers_;  // that were started
  CommandClient stopper_{run_dir_};
};

// What another program that uses the run directory would not agree with.
Status check_run(const RunOptions& o, const rundir::OpenedJob& opened) {
  const std::string& run = opened.run;
  const int holder = rundir::RunLock::holder(run);
  const auto end = rundir::end_of_run(run);
  if (holder == 0 && end && !o.resume) {
    const auto held = rundir::load_resolved({}, run);
    const std::string keys =
        held.ok() ? jobfile::changes_text(*held, opened.job) : "";
    return ended(fmt::format(
        "{}: {}{}", run, rundir::end_text(*end, run),
        keys.empty() ? ""
                     : "; the job given is another one (" + keys +
                           "): give another --run-dir to train that"));
  }
  // A coordinator checks the rest.
  return running_coordinator({opened.job, o.set}, run).status();
}

// What the run needs on this host, and an error if it cannot start for lack of
// it: then each worker would say so, again and again. Empty if it runs already.
Result<std::vector<Need>> look_before(const RunOptions& o,
                                      const rundir::OpenedJob& opened) {
  if (rundir::RunLock::holder(opened.run) > 0) return std::vector<Need>();
  const auto journal = server::read_journal(*posix_file_system(),
                                            rundir::journal_path(opened.run));
  std::vector<Need> needs =
      look_ahead({.job = opened.job,
                  .run_dir = opened.run,
                  .workers = o.local_workers,
                  .slots_per_worker = o.slots_per_worker,
                  .state_job = journal.ok() ? journal->state_job() : 0});
  if (!o.json) fmt::print("{}", needs_text(needs, style_of_stdout()));
  std::fflush(stdout);
  const std::string fatal = fatal_text(needs);
  if (fatal.empty()) return needs;
  return exhausted("the run cannot start here:\n  " + fatal);
}

void print_detached(const RunOptions& o, const std::string& run,
                    const std::vector<Need>& needs, const Detached& d) {
  if (o.json) {
    const auto endpoint = rundir::read_endpoint(run);
    nlohmann::ordered_json address;
    if (endpoint.ok()) address = endpoint->address;
    print_json({{"run_dir", run},
                {"address", std::move(address)},
                {"pid", d.child()},
                {"output", d.output_path()},
                {"needs", needs_json(needs)}});
    return;
  }
  const std::string name = rundir::typed_path(run);
  fmt::print(
      "{} continues in the background, pid {}\n\n"
      "  remesh status {} -w\n  tail -f {}\n  remesh stop {}\n",
      name, d.child(), name, rundir::typed_path(d.output_path()), name);
}

// A job from a pipe is read by this program and each of its coordinators, so it
// becomes a file in memory that is the standard input.
Status take_piped_job(RunOptions* o) {
  std::error_code error;
  const bool standard = o->job_file == jobfile::kStandardInput;
  if (o->job_file.empty() ||
      (!standard && (std::filesystem::is_regular_file(o->job_file, error) ||
                     is_folder(o->job_file) || !path_exists(o->job_file))))
    return ok_status();
  ASSIGN_OR_RETURN(const std::string text, jobfile::read_text(o->job_file));
  const int fd = memfd_create("job", MFD_CLOEXEC);
  if (fd < 0 ||
      pwrite(fd, text.data(), text.size(), 0) !=
          static_cast<ssize_t>(text.size()) ||
      dup2(fd, STDIN_FILENO) < 0)
    return errno_error("keep the job in memory", errno);
  close(fd);
  o->job_file = jobfile::kStandardInput;
  return ok_status();
}

Result<int> run_job(RunOptions options) {
  RETURN_IF_ERROR(share_new_files(/*group=*/""));
  RETURN_IF_ERROR(take_piped_job(&options));
  ASSIGN_OR_RETURN(
      rundir::OpenedJob opened,
      rundir::open_job({options.job_file, options.set}, options.run_dir,
                       options.resume, unix_seconds()));
  const rundir::RemovedIfEmpty unused{opened.made ? opened.run : ""};
  RETURN_IF_ERROR(check_run(options, opened));
  ASSIGN_OR_RETURN(const std::vector<Need> needs, look_before(options, opened));
  std::optional<Detached> detached;
  if (options.detach) {
    ASSIGN_OR_RETURN(Detached both, Detached::start());
    detached.emplace(std::move(both));
    if (const auto code = detached->exit_code_of_parent()) {
      if (*code == kExitOk)
        print_detached(options, opened.run, needs, *detached);
      else
        print_lines(detached->output());
      return *code;
    }
  }
  RunJob run(options, std::move(opened.job), opened.run);
  RETURN_IF_ERROR(run.start());
  return run.run([&](bool own) {
    // The log of a run belongs to whoever started its coordinator.
    const std::string name = own ? "run" : fmt::format("run-{}", getpid());
    if (detached)
      detached->say_running(rundir::logs_path(opened.run) + "/" + name +
                            ".out");
  });
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
      remesh-worker --connect RUN --slots N
      or, where it cannot see RUN, with --connect tcp://HOST:5710 --key FILE

Workers can join and leave during the run: remesh-worker --connect RUN.
Ctrl-C saves and stops; a second Ctrl-C kills immediately. If the run had a
coordinator before, Ctrl-C only ends this command. Closing the terminal counts
as Ctrl-C, unless the run was started with --detach.)");
  c->callback([o, code] { *code = exit_code(run_job(*o)); });
  add_resume_verb(app, code);
}

}  // namespace remesh::ctl
