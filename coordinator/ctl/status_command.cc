// `remesh status`
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "coordinator/ctl/client.h"
#include "coordinator/ctl/screen.h"
#include "coordinator/ctl/status_view.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/line_file.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "coordinator/server/journal.h"
#include "proto/base/clock.h"
#include "proto/data/index.h"
#include "proto/rundir/file_tail.h"

namespace remesh::ctl {
namespace {

constexpr int kWatchIntervalMs = 1000;
constexpr char kCtrlC = 3;

struct StatusOptions {
  std::string run;
  bool watch = false;
  bool json = false;
};

std::vector<pb::EventRecord> events_of(const std::vector<std::string>& lines) {
  std::vector<pb::EventRecord> out;
  for (const std::string& line : lines)
    if (auto e = rundir::parse_event_line(line); e.ok())
      out.push_back(std::move(*e));
  return out;
}

Result<int> show(const StatusOptions& o, bool clear) {
  const Style style = style_of_stdout();
  ASSIGN_OR_RETURN(const Target target, find_target(o.run));
  const auto answer = send_command(target, command_of(pb::Command::STATUS));
  if (!answer.ok() && target.run_dir.empty()) return answer.status();
  const pb::JobStatus status =
      answer.ok() ? *answer : status_of_files(target.run_dir);
  const RunFacts facts = facts_of_run(status);
  std::string text = o.json
                         ? status_json(status, facts)
                         : fold(status_text(status, facts, style), style.width);
  if (clear) {
    const TerminalSize size = terminal_size();
    text = "\x1b[H\x1b[J" + fit(text, size.columns, size.rows,
                                "  q or Ctrl-C: quit; updates every 1 s");
  }
  fmt::print("{}", text);
  std::fflush(stdout);
  if (answer.ok() || has_ended(status.state())) return kExitOk;
  return answer.status();
}

int status(StatusOptions o) {
  if (!o.watch) return exit_code(show(o, false));
  // The run that it is now, whichever is the newest later.
  const auto target = find_target(o.run);
  if (!target.ok()) return exit_code(target.status());
  if (!target->run_dir.empty()) o.run = target->run_dir;
  const bool clear = stdout_is_terminal();
  Keys keys;
  char key = 0;
  int code = kExitOk;
  while (key != 'q' && key != kCtrlC && code != kExitUsage) {
    code = exit_code(show(o, clear));
    if (code != kExitUsage) key = keys.wait(kWatchIntervalMs);
  }
  if (clear) fmt::print("\n");
  return code;
}

// The names of the members of a run's data set that have held-out text, in
// their order; none if it is no mixture or cannot be read.
std::vector<std::string> validated_members(const std::string& run) {
  std::vector<std::string> out;
  const auto job = rundir::job_of_run(*posix_file_system(), run);
  if (!job.ok()) return out;
  const auto index = data::read_index(job->data().path());
  if (!index.ok()) return out;
  for (const data::MemberEntry& m : index->members)
    if (m.val_tokens > job->train().seq_len()) out.push_back(m.name);
  return out;
}

}  // namespace

pb::JobStatus status_of_files(const std::string& run) {
  pb::JobStatus s;
  s.set_run_dir(run);
  const auto fs = posix_file_system();
  const auto journal = server::read_journal(*fs, rundir::journal_path(run));
  auto job = rundir::load_resolved({}, run);
  // What somebody has edited there counts once the run has taken it.
  if (journal.ok() && journal->has_job() &&
      (!job.ok() || rundir::check_unedited(*fs, run, *journal).code() ==
                        Code::kInvalidArgument))
    job = journal->job();
  if (job.ok()) {
    s.set_job(job->job().name());
    s.set_steps(job->train().steps());
    *s.mutable_parallel() = job->parallel();
    s.set_recompute(job->train().recompute());
    s.set_recompute_every(job->train().recompute_every());
  }
  const auto end = rundir::end_of_run(run);
  const int holder = rundir::RunLock::holder(run);
  s.set_state(holder > 0 ? pb::JobStatus::NOT_ANSWERING
              : end      ? end->outcome
                         : pb::JobStatus::NOT_RUNNING);
  const rundir::NewestState newest = newest_state_of(run);
  if (newest.source == pb::Source::MEMORY) {
    s.mutable_kept_state()->set_step(newest.state_step);
    s.mutable_kept_state()->set_kept_until(newest.kept_until);
  }
  s.set_detail(
      holder > 0
          ? fmt::format("the coordinator (pid {}) is alive but does not answer",
                        holder)
          : why_not_running(run, newest));
  if (const auto metrics = rundir::recent_metrics(run); !metrics.empty()) {
    s.set_step(metrics.back().step());
    *s.mutable_last() = metrics.back();
    s.set_generation(metrics.back().generation());
    *s.mutable_mesh() = metrics.back().mesh();
  }
  s.set_checkpoint_step(newest.checkpoint_step);
  // As many as a coordinator gives.
  constexpr size_t kEvents = 50;
  std::vector<pb::EventRecord> events =
      events_of(rundir::read_last_lines(rundir::events_path(run)));
  for (size_t i = events.size() - std::min(events.size(), kEvents);
       i < events.size(); ++i)
    *s.add_events() = std::move(events[i]);
  return s;
}

RunFacts facts_of_run(const pb::JobStatus& s) {
  RunFacts facts =
      facts_of(rundir::recent_metrics(s.run_dir()),
               events_of(rundir::read_lines(rundir::events_path(s.run_dir()))),
               s.steps(), unix_seconds());
  facts.members = validated_members(s.run_dir());
  return facts;
}

void add_status_verb(CLI::App* app, int* code) {
  auto o = std::make_shared<StatusOptions>();
  CLI::App* c = app->add_subcommand("status", "Show a run");
  add_client_options(c, &o->run);
  c->add_flag("-w,--watch", o->watch, "Refresh every second, until q");
  add_json_option(c, &o->json);
  c->footer(R"(
Examples:
  remesh status
  remesh status runs/books-20261121-161810 -w
  remesh status tcp://head:5710 --json

Exit code 0 also if the run has ended: `state` is done, stopped or failed then.
4 if it has not ended but has no coordinator, 75 if that does not answer; the
run's files are shown then.)");
  c->callback([o, code] { *code = status(*o); });
}

}  // namespace remesh::ctl
