#include "coordinator/ctl/commands.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>

#include "checkpoint/manifest/manifest.h"
#include "coordinator/ctl/children.h"
#include "coordinator/ctl/client.h"
#include "coordinator/ctl/screen.h"
#include "coordinator/ctl/status_view.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/line_file.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "proto/base/clock.h"
#include "proto/base/text.h"

namespace remesh::ctl {
namespace {

constexpr int kAnswerMs = 3000;
constexpr int kPollMs = 200;
constexpr int kWatchMs = 1000;
// A save that reports the same error as the one before it gives no new event;
// after so long without a checkpoint the error is taken for this save's.
constexpr int64_t kSameErrorMs = 5000;

void pause_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

// A question to the coordinator of a run; a refusal is a failure.
Result<pb::JobStatus> tell(const Target& target, const pb::Command& command) {
  if (target.address.empty()) {
    return unavailable(target.run_dir +
                       ": no coordinator runs this job (it has ended, or was "
                       "not started); `remesh run JOB --resume --run-dir " +
                       target.run_dir + "` goes on with it");
  }
  // No need to wait for the answer of the dead.
  if (const auto e = rundir::read_endpoint(target.run_dir);
      e.ok() && e.value().host == rundir::host_name() &&
      rundir::RunLock::holder(target.run_dir) == 0) {
    return unavailable(fmt::format(
        "{}: the coordinator (pid {}) is dead; starting the job again on this "
        "run directory takes it over",
        target.run_dir, e.value().pid));
  }
  ASSIGN_OR_RETURN(const pb::Reply reply,
                   ask(target.address, command, kAnswerMs));
  if (!reply.ok()) return unavailable(reply.error());
  return reply.status();
}

Result<pb::JobStatus> tell(const std::string& run, pb::Command::Kind kind) {
  ASSIGN_OR_RETURN(const Target target, find_target(run));
  pb::Command command;
  command.set_kind(kind);
  return tell(target, command);
}

// Asks again, with the address read anew: a coordinator may be restarting.
Result<pb::JobStatus> status_of(const std::string& run) {
  return tell(run, pb::Command::STATUS);
}

bool ended(const std::string& state) {
  return state == "done" || state == "failed" || state == "stopped";
}

// The checkpoint folder of the run a coordinator told of.
std::string checkpoint_path(const pb::JobStatus& s) {
  std::string folder = "checkpoints";
  if (const auto job = jobfile::load_job(rundir::job_path(s.run_dir()));
      job.ok()) {
    folder = job.value().checkpoint().folder();
  }
  if (!folder.starts_with('/')) folder = s.run_dir() + "/" + folder;
  return folder + "/" + manifest::step_name(s.checkpoint_step());
}

std::string rank_checkpoint_error(const pb::JobStatus& s) {
  for (const pb::WorkerStatus& w : s.workers()) {
    for (const pb::RankStatus& r : w.ranks()) {
      if (!r.checkpoint_error().empty()) return r.checkpoint_error();
    }
  }
  return "";
}

// What the files of a run say when its coordinator does not answer.
std::string files_text(const std::string& run, const Style& style) {
  std::string out = fmt::format("run {}\n", run);
  const auto endpoint = rundir::read_endpoint(run);
  const int holder = rundir::RunLock::holder(run);
  if (holder > 0) {
    out += fmt::format("  the coordinator lives (pid {}) but does not answer\n",
                       holder);
  } else if (endpoint.ok()) {
    const auto& e = endpoint.value();
    const bool here = e.host == rundir::host_name();
    out += fmt::format("  coordinator {} on {}, pid {}{}\n", e.address, e.host,
                       e.pid,
                       !here                          ? ""
                       : rundir::process_alive(e.pid) ? ": alive"
                                                      : ": dead");
  } else {
    out += "  no coordinator\n";
  }
  const auto metrics = rundir::read_lines(rundir::metrics_path(run));
  const auto last =
      rundir::parse_metrics_line(metrics.empty() ? "" : metrics.back());
  out += last.ok() ? "  last finished: " +
                         step_line(last.value(), last.value().step()) + "\n"
                   : "  no finished step\n";
  const auto events = rundir::read_lines(rundir::events_path(run));
  constexpr size_t kShown = 8;
  for (size_t i = events.size() > kShown ? events.size() - kShown : 0;
       i < events.size(); ++i) {
    const auto e = rundir::parse_event_line(events[i]);
    if (!e.ok()) continue;
    out += "  " + clock_text(e.value().time()) + "  " +
           toned(event_text(e.value()), event_tone(e.value()), style) + "\n";
  }
  return out;
}

int show_status_once(const StatusOptions& options, bool clear) {
  const Style style = style_of_stdout();
  const auto target = find_target(options.run);
  if (!target.ok()) return fail(target.status());
  const auto status = tell(target.value(), pb::Command());
  if (status.ok()) {
    const std::string text = options.json ? status_json(status.value())
                                          : status_text(status.value(), style);
    fmt::print("{}{}", clear ? "\x1b[H\x1b[J" : "", text);
  } else {
    if (!target.value().run_dir.empty() && !options.json) {
      fmt::print("{}{}", clear ? "\x1b[H\x1b[J" : "",
                 files_text(target.value().run_dir, style));
    }
    std::fflush(stdout);
    fmt::print(stderr, "remesh: {}\n", status.status().message());
  }
  std::fflush(stdout);
  return status.ok() ? kExitOk : kExitFailed;
}

}  // namespace

int status_command(const StatusOptions& options) {
  const bool clear = options.watch && stdout_is_terminal();
  int code = show_status_once(options, clear);
  while (options.watch && code != kExitUsage) {
    pause_ms(kWatchMs);
    code = show_status_once(options, clear);
  }
  return code;
}

int drain_command(const std::string& worker, const std::string& run) {
  const auto target = find_target(run);
  if (!target.ok()) return fail(target.status());
  pb::Command command;
  command.set_kind(pb::Command::DRAIN);
  command.set_worker(worker);
  const auto status = tell(target.value(), command);
  if (!status.ok()) return fail(status.status());
  fmt::print("worker {} finishes its step and leaves\n", worker);
  return kExitOk;
}

int mesh_command(const std::string& layout, const std::string& run) {
  const auto target = find_target(run);
  if (!target.ok()) return fail(target.status());
  pb::Command command;
  command.set_kind(pb::Command::MESH);
  command.set_layout(layout);
  const auto status = tell(target.value(), command);
  if (!status.ok()) return fail(status.status());
  const pb::JobStatus& s = status.value();
  if (s.pinned().empty()) {
    fmt::print("the mesh is chosen by the slots there are\n");
  } else {
    fmt::print("mesh {} from the next step boundary on, {}\n", s.pinned(),
               "until another is asked for or the slots do not suffice");
  }
  return kExitOk;
}

int scale_command(const std::string& slots, const std::string& run) {
  int number = 0;
  const char* end = slots.data() + slots.size();
  const auto [at, error] = std::from_chars(slots.data(), end, number);
  const bool is_number = error == std::errc() && at == end && number >= 1;
  if (slots != "all" && !is_number)
    return fail(invalid_argument(fmt::format(
        "'{}' is no number of slots: give 1 or more, or 'all'", slots)));
  const auto target = find_target(run);
  if (!target.ok()) return fail(target.status());
  pb::Command command;
  command.set_kind(pb::Command::SCALE);
  command.set_slots(number);
  const auto status = tell(target.value(), command);
  if (!status.ok()) return fail(status.status());
  if (status.value().scale() == 0) {
    fmt::print("all slots are used from the next step boundary on\n");
  } else {
    fmt::print("up to {} slots are used from the next step boundary on, {}\n",
               status.value().scale(), "others are spares");
  }
  return kExitOk;
}

int plan_command(const PlanOptions& options) {
  const auto job = rundir::load_resolved(options.job_file, options.set);
  if (!job.ok()) return fail(job.status());
  PlanOptions o = options;
  if (o.cores == 0)
    o.cores =
        static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  const auto text = plan_text(job.value(), o);
  if (!text.ok()) return fail(text.status());
  fmt::print("{}", text.value());
  return kExitOk;
}

int checkpoint_command(const std::string& run) {
  const auto asked = tell(run, pb::Command::CHECKPOINT);
  if (!asked.ok()) return fail(asked.status());
  const int64_t before = asked.value().checkpoint_step();
  const double asked_at = unix_seconds();
  const int64_t began = monotonic_ms();
  for (;;) {
    pause_ms(kPollMs);
    const auto now = status_of(run);
    // A restarting coordinator answers again soon; one that is gone for good
    // has ended the job.
    if (!now.ok()) {
      if (monotonic_ms() - began < 10 * kAnswerMs) continue;
      return fail(now.status());
    }
    const pb::JobStatus& s = now.value();
    if (s.checkpoint_step() > before) {
      fmt::print("{}\n", checkpoint_path(s));
      return kExitOk;
    }
    for (const pb::EventRecord& e : s.events()) {
      if (e.event() == "checkpoint_failed" && e.time() >= asked_at) {
        return fail(unavailable("the checkpoint was not saved: " + e.cause()));
      }
    }
    const std::string error = rank_checkpoint_error(s);
    if (!error.empty() && monotonic_ms() - began > kSameErrorMs) {
      return fail(unavailable("the checkpoint was not saved: " + error));
    }
    if (ended(s.state())) {
      return fail(unavailable("the job is " + s.state() +
                              ", no new checkpoint was made"));
    }
  }
}

int stop_command(const std::string& run) {
  const auto target = find_target(run);
  if (!target.ok()) return fail(target.status());
  auto status = tell(run, pb::Command::STOP);
  if (!status.ok()) return fail(status.status());
  const std::string run_dir = status.value().run_dir();
  std::string state = status.value().state();
  int64_t step = status.value().step();
  // The coordinator leaves soon after the end; when it is gone, so is the job.
  while (!ended(state)) {
    pause_ms(kPollMs);
    status = status_of(run);
    if (status.ok()) {
      state = status.value().state();
      step = status.value().step();
      continue;
    }
    if (rundir::RunLock::holder(run_dir) > 0) continue;
    const auto events = rundir::read_lines(rundir::events_path(run_dir));
    const auto last =
        rundir::parse_event_line(events.empty() ? "" : events.back());
    for (const std::string end : {"done", "failed", "stopped"}) {
      if (last.ok() && last.value().event() == "job_" + end) state = end;
    }
    if (!ended(state)) return fail(status.status());
    step = last.value().step();
  }
  fmt::print("the job is {} at step {}\n", state, step);
  return state == "failed" ? kExitFailed : kExitOk;
}

int job_check_command(const std::string& job_file,
                      const std::vector<std::string>& set) {
  const auto job = rundir::load_resolved(job_file, set);
  if (!job.ok()) return fail(job.status());
  fmt::print("{}", jobfile::to_toml(job.value()));
  return kExitOk;
}

int job_defaults_command() {
  fmt::print("{}", jobfile::commented_example());
  return kExitOk;
}

int data_command(const std::vector<std::string>& arguments) {
  const auto program = program_beside("remesh-data");
  if (!program.ok()) return fail(program.status());
  std::vector<std::string> argv = {program.value()};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  std::vector<char*> raw;
  for (std::string& a : argv) raw.push_back(a.data());
  raw.push_back(nullptr);
  execv(raw[0], raw.data());
  return fail(errno_error("start " + program.value(), errno));
}

}  // namespace remesh::ctl
