#include "coordinator/ctl/run.h"

#include <fmt/format.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <memory>
#include <set>

#include "checkpoint/manifest/scan.h"
#include "coordinator/ctl/children.h"
#include "coordinator/ctl/client.h"
#include "coordinator/ctl/follower.h"
#include "coordinator/ctl/screen.h"
#include "coordinator/ctl/summary.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "proto/base/clock.h"
#include "proto/wire/loop.h"

namespace remesh::ctl {
namespace {

constexpr int kTickMs = 50;
constexpr int64_t kStopResendMs = 1000;
// Time for workers to go by themselves once the job has ended, and after
// SIGTERM.
constexpr int64_t kLeaveMs = 6000;
constexpr int64_t kTermMs = 3000;
constexpr int64_t kHurryMs = 2000;
// The coordinator is started again with a growing pause, at most so often in a
// minute.
constexpr int64_t kFirstPauseMs = 100;
constexpr int64_t kMaxPauseMs = 5000;
constexpr size_t kMaxRestarts = 10;
constexpr int64_t kRestartWindowMs = 60'000;
constexpr int64_t kRespawnPauseMs = 1000;
constexpr int64_t kGoneMs = 3000;

constexpr int kExitDone = 0;
constexpr int kExitUsage = 2;
constexpr int kExitFailed = 3;
constexpr int kExitInterrupted = 130;

constexpr char kCoordinator[] = "coordinator";

std::string last_line_of(const std::string& path) {
  const auto lines = rundir::read_lines(path);
  return lines.empty() ? "" : lines.back();
}

// A path as short as it can be typed from here.
std::string shown(const std::string& path) {
  std::error_code error;
  const auto here = std::filesystem::current_path(error);
  if (error) return path;
  const std::string near =
      std::filesystem::path(path).lexically_relative(here).string();
  return near.empty() || near.starts_with("..") ? path : near;
}

class RunJob {
 public:
  RunJob(const RunOptions& options, pb::Job job, std::string run_dir)
      : options_(options),
        job_(std::move(job)),
        run_dir_(std::move(run_dir)),
        began_(unix_seconds()),
        screen_(stdout_is_terminal(), style_of_stdout()),
        loop_(kTickMs) {}

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
    RETURN_IF_ERROR(rundir::create(run_dir_));
    rundir::point_latest(job_.job().dump_folder(), run_dir_);
    follower_ = std::make_unique<Follower>(job_, run_dir_, &screen_);
    const int holder = rundir::RunLock::holder(run_dir_);
    if (holder > 0) {
      attached_ = true;
      say(
          fmt::format("a coordinator runs this job already (pid {}); this "
                      "follows it",
                      holder));
    } else {
      RETURN_IF_ERROR(start_coordinator());
    }
    return ok_status();
  }

  int run() {
    loop_.on_tick([this] { tick(); });
    int code = loop_.run();
    children_.kill_all();
    follower_->poll(monotonic_ms(), unix_seconds());
    screen_.bottom("");
    if (code == kExitUsage) {
      for (const std::string& line :
           rundir::read_lines(output_of(kCoordinator))) {
        fmt::print(stderr, "{}\n", line);
      }
      return code;
    }
    summarize(code);
    return code;
  }

 private:
  enum class Stage {
    kStarting,  // no coordinator listens yet
    kRunning,
    kLeaving,    // the job has ended; workers leave by themselves
    kTerminate,  // they were sent SIGTERM
    kHurry,      // second Ctrl-C: SIGTERM twice
  };

  std::string output_of(const std::string& name) const {
    return rundir::logs_path(run_dir_) + "/" + name + ".out";
  }

  void say(const std::string& text, Tone tone = Tone::kNotice) {
    follower_->say(text, tone, unix_seconds());
  }

  // --------------------------------------------------------------- starting

  Status start_coordinator() {
    std::vector<std::string> argv = {coordinator_program_,
                                     options_.job_file,
                                     "--run-dir",
                                     run_dir_,
                                     "--bind",
                                     options_.bind};
    if (!options_.advertise.empty()) {
      argv.insert(argv.end(), {"--advertise", options_.advertise});
    }
    // Once only: a coordinator that is started again finds its own work.
    if (options_.resume && starts_ == 0) {
      argv.push_back("--resume");
    }
    for (const std::string& s : options_.set) {
      argv.insert(argv.end(), {"--set", s});
    }
    // What an earlier session said is not this one's reason.
    if (starts_++ == 0) std::remove(output_of(kCoordinator).c_str());
    coordinator_starts_.push_back(monotonic_ms());
    ASSIGN_OR_RETURN(
        coordinator_pid_,
        children_.start(kCoordinator, argv, output_of(kCoordinator)));
    return ok_status();
  }

  bool coordinator_listens() const {
    const auto endpoint = rundir::read_endpoint(run_dir_);
    return endpoint.ok() &&
           (attached_ || endpoint.value().pid == coordinator_pid_);
  }

  void start_worker(int number) {
    const std::string name = fmt::format("local-{}", number);
    const auto pid =
        children_.start(name,
                        {worker_program_, "--connect", run_dir_, "--slots",
                         fmt::format("{}", options_.slots_per_worker), "--job",
                         job_.job().name()},
                        output_of("worker-" + name));
    if (!pid.ok()) say(pid.status().message(), Tone::kBad);
  }

  void greet() {
    const auto endpoint = rundir::read_endpoint(run_dir_);
    if (!endpoint.ok()) return;
    say(fmt::format("run directory {}", run_dir_));
    say(fmt::format("more workers join with: remesh-worker --connect {}",
                    endpoint.value().host == rundir::host_name()
                        ? run_dir_
                        : endpoint.value().address));
    for (int i = 1; i <= options_.local_workers; ++i)
      if (!children_.running(fmt::format("local-{}", i))) start_worker(i);
  }

  // The coordinator that this followed is gone, and the job has not been seen
  // to end since: it was just ending, or died. Who restarts it has the lock
  // again soon; else it is ours now.
  void take_over(int64_t now) {
    if (!attached_ || stage_ > Stage::kRunning || interrupted_ ||
        !follower_->outcome().empty() ||
        rundir::RunLock::holder(run_dir_) > 0) {
      gone_since_ms_ = 0;
      return;
    }
    if (gone_since_ms_ == 0) gone_since_ms_ = now;
    if (now - gone_since_ms_ < kGoneMs) return;
    say("the coordinator that was followed is gone: starting one");
    attached_ = false;
    enter(Stage::kStarting);
    if (const Status s = start_coordinator(); !s.ok()) {
      reason_ = s.message();
      code_ = kExitFailed;
      leave();
    }
  }

  // ---------------------------------------------------------------- signals

  void on_signal(int signal) {
    if (signal == SIGCHLD) return reap();
    ++interrupts_;
    if (interrupts_ == 1 && attached_) {
      say("not followed any longer; the job goes on, `remesh stop` ends it");
      interrupted_ = true;
      return leave();
    }
    if (interrupts_ == 1) {
      interrupted_ = true;
      say("stopping: saves, then ends. Ctrl-C again kills at once");
      follower_->set_note("saving and stopping");
      return send_stop();
    }
    if (interrupts_ == 2) {
      say("killing everything", Tone::kBad);
      enter(Stage::kHurry);
      children_.signal(kCoordinator, SIGKILL);
      // Asked twice, they kill at once. Two signals, because the kernel makes
      // one of two equal ones that are pending.
      signal_workers(SIGTERM);
      signal_workers(SIGINT);
      return;
    }
    loop_.stop(kExitInterrupted);
  }

  void send_stop() {
    stop_sent_ms_ = monotonic_ms();
    if (const auto endpoint = rundir::read_endpoint(run_dir_); endpoint.ok()) {
      if (!stopper_ || stop_address_ != endpoint.value().address) {
        stop_address_ = endpoint.value().address;
        auto asker = Asker::connect(stop_address_);
        if (!asker.ok()) return;
        stopper_ = std::move(*asker);
      }
      pb::Command command;
      command.set_kind(pb::Command::STOP);
      stopper_->send(command);
    }
  }

  void signal_workers(int signal) {
    for (int i = 1; i <= options_.local_workers; ++i) {
      children_.signal(fmt::format("local-{}", i), signal);
    }
  }

  // --------------------------------------------------------------- children

  void reap() {
    for (const Ended& e : children_.reap()) {
      if (e.name == kCoordinator) {
        coordinator_ended(e);
      } else if (!e.name.empty()) {
        worker_ended(e);
      }
    }
  }

  void coordinator_ended(const Ended& e) {
    if (stage_ == Stage::kHurry) return;
    if (e.signal == 0 &&
        (e.exit_code == kExitDone || e.exit_code == kExitFailed ||
         e.exit_code == kExitUsage)) {
      code_ = e.exit_code;
      return e.exit_code == kExitUsage ? loop_.stop(kExitUsage) : leave();
    }
    const int64_t now = monotonic_ms();
    while (!coordinator_starts_.empty() &&
           now - coordinator_starts_.front() > kRestartWindowMs) {
      coordinator_starts_.pop_front();
    }
    if (coordinator_starts_.size() > kMaxRestarts) {
      reason_ = fmt::format(
          "the coordinator died {} times within a minute, last it {}; see {}",
          coordinator_starts_.size(), how_it_ended(e),
          rundir::logs_path(run_dir_));
      code_ = kExitFailed;
      return leave();
    }
    const size_t n = coordinator_starts_.size();
    const int64_t pause =
        std::min(kMaxPauseMs, kFirstPauseMs << (n < 2 ? 0 : n - 2));
    restart_at_ms_ = now + pause;
    say(fmt::format("the coordinator {}; it is started again, the training "
                    "goes on meanwhile",
                    how_it_ended(e)),
        Tone::kBad);
  }

  void worker_ended(const Ended& e) {
    if (stage_ == Stage::kLeaving || stage_ == Stage::kTerminate ||
        stage_ == Stage::kHurry) {
      return;
    }
    // One that left in order was told to, and the events say why.
    const bool in_order = e.signal == 0 && e.exit_code == 0;
    if (!in_order) {
      say(fmt::format("worker process {} {}", e.pid, how_it_ended(e)),
          Tone::kBad);
      const std::string last = last_line_of(output_of("worker-" + e.name));
      if (e.signal == 0 && !last.empty()) say(last, Tone::kBad);
    }
    if (options_.respawn && !in_order && !interrupted_) {
      respawn_at_[std::stoi(e.name.substr(6))] =
          monotonic_ms() + kRespawnPauseMs;
    }
  }

  // ------------------------------------------------------------------ stages

  void enter(Stage stage) {
    stage_ = stage;
    stage_since_ms_ = monotonic_ms();
  }

  void leave() {
    if (stage_ == Stage::kStarting || stage_ == Stage::kRunning) {
      // Workers were told by the coordinator; those of a job that goes on
      // without us, or that lost its coordinator, are told now.
      enter(Stage::kLeaving);
      if (attached_ || !reason_.empty()) signal_workers(SIGTERM);
    }
  }

  void tick() {
    const int64_t now = monotonic_ms();
    reap();
    follower_->poll(now, unix_seconds());
    switch (stage_) {
      case Stage::kStarting:
        if (coordinator_listens()) {
          enter(Stage::kRunning);
          greet();
        }
        break;
      case Stage::kRunning:
        if (attached_ && !follower_->outcome().empty()) {
          code_ = follower_->outcome() == "failed" ? kExitFailed : kExitDone;
          leave();
        }
        break;
      default:
        wind_up(now);
    }
    take_over(now);
    start_again(now);
    if (interrupted_ && !attached_ && stage_ < Stage::kLeaving) {
      ask_to_stop(now);
    }
  }

  void ask_to_stop(int64_t now) {
    if (stopper_ && stopper_->waiting()) {
      if (const auto reply = stopper_->poll()) stop_heard_ = reply->ok();
    }
    if (!stop_heard_ && now - stop_sent_ms_ >= kStopResendMs) send_stop();
  }

  void start_again(int64_t now) {
    if (stage_ >= Stage::kLeaving) return;
    if (restart_at_ms_ > 0 && now >= restart_at_ms_) {
      restart_at_ms_ = 0;
      stop_heard_ = false;  // the new life may not know of it
      if (const Status s = start_coordinator(); !s.ok()) {
        reason_ = s.message();
        code_ = kExitFailed;
        leave();
      }
    }
    for (auto it = respawn_at_.begin(); it != respawn_at_.end();) {
      if (now < it->second) {
        ++it;
        continue;
      }
      start_worker(it->first);
      it = respawn_at_.erase(it);
    }
  }

  // From the end of the job to the end of the last child.
  void wind_up(int64_t now) {
    const int64_t since = now - stage_since_ms_;
    if (children_.count() == 0) {
      return loop_.stop(interrupted_ && code_ == kExitDone ? kExitInterrupted
                                                           : code_);
    }
    if (stage_ == Stage::kHurry && since > kHurryMs) {
      code_ = kExitInterrupted;
      children_.kill_all();
    } else if (stage_ == Stage::kLeaving && since > kLeaveMs) {
      signal_workers(SIGTERM);
      enter(Stage::kTerminate);
    } else if (stage_ == Stage::kTerminate && since > kTermMs) {
      children_.kill_all();
    }
  }

  // ---------------------------------------------------------------- the end

  std::string newest_checkpoint() const {
    const std::string& folder = job_.checkpoint().folder();
    const auto fs = manifest::posix_file_system();
    const auto found = manifest::scan(
        *fs, folder.starts_with('/') ? folder : run_dir_ + "/" + folder);
    if (!found.ok()) return "";
    const auto* newest = manifest::choose_newest_valid(found.value());
    return newest == nullptr ? "" : newest->path;
  }

  void summarize(int code) {
    RunSummary s{.job_file = options_.job_file, .run_dir = shown(run_dir_)};
    s.outcome = code == kExitFailed            ? "failed"
                : interrupted_                 ? "interrupted"
                : follower_->outcome().empty() ? "had ended before"
                                               : follower_->outcome();
    s.steps = job_.train().steps();
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
    s.checkpoint = newest.empty() ? "" : shown(newest);
    screen_.line(summary_text(s, screen_.style()));
    screen_.flush();
    if (follower_->outcome().empty() && !interrupted_ && reason_.empty()) {
      screen_.line("This run had ended before; --resume goes on with it.");
      screen_.flush();
    }
    if (code != kExitFailed) return;
    std::string reason = !reason_.empty() ? reason_ : follower_->reason();
    if (reason.empty()) reason = last_line_of(output_of(kCoordinator));
    fmt::print(stderr, "remesh: {}\n",
               reason.empty() ? "the job failed" : reason);
  }

  RunOptions options_;
  pb::Job job_;
  std::string run_dir_;
  double began_;
  Screen screen_;
  wire::Loop loop_;
  Children children_;
  std::unique_ptr<Follower> follower_;
  std::string coordinator_program_;
  std::string worker_program_;
  bool attached_ = false;  // the coordinator is not ours
  int coordinator_pid_ = 0;
  int starts_ = 0;                          // of the coordinator
  std::deque<int64_t> coordinator_starts_;  // times, within the window
  int64_t gone_since_ms_ = 0;  // the coordinator that was followed; 0: it lives
  int64_t restart_at_ms_ = 0;  // 0: not due
  std::map<int, int64_t> respawn_at_;  // worker number -> when
  Stage stage_ = Stage::kStarting;
  int64_t stage_since_ms_ = 0;
  int interrupts_ = 0;
  bool interrupted_ = false;
  bool stop_heard_ = false;
  int64_t stop_sent_ms_ = 0;
  std::string stop_address_;
  std::unique_ptr<Asker> stopper_;
  int code_ = kExitDone;
  std::string reason_;
};

int fail(const Status& status) {
  fmt::print(stderr, "remesh: {}\n", status.message());
  return status.code() == Code::kInvalidArgument ||
                 status.code() == Code::kNotFound
             ? kExitUsage
             : kExitFailed;
}

}  // namespace

int run_job(const RunOptions& options) {
  auto job = rundir::load_resolved(options.job_file, options.set);
  if (!job.ok()) return fail(job.status());
  auto run_dir =
      rundir::choose_run(job->job().dump_folder(), job->job().name(),
                         options.run_dir, options.resume, unix_seconds());
  if (!run_dir.ok()) return fail(run_dir.status());
  RunJob run(options, std::move(*job), std::move(*run_dir));
  if (const Status s = run.start(); !s.ok()) return fail(s);
  return run.run();
}

}  // namespace remesh::ctl
