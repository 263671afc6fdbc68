// `remesh status`
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>

#include "coordinator/ctl/client.h"
#include "coordinator/ctl/screen.h"
#include "coordinator/ctl/status_view.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/line_file.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "proto/base/process.h"

namespace remesh::ctl {
namespace {

constexpr std::chrono::seconds kWatchInterval(1);

struct Options {
  std::string run;
  bool watch = false;
  bool json = false;
};

std::string coordinator_text(const std::string& run) {
  if (const int holder = rundir::RunLock::holder(run); holder > 0)
    return fmt::format("the coordinator is alive (pid {}) but does not answer",
                       holder);
  const auto endpoint = rundir::read_endpoint(run);
  if (!endpoint.ok()) return "no coordinator";
  const auto& e = endpoint.value();
  std::string out =
      fmt::format("coordinator {} on {}, pid {}", e.address, e.host, e.pid);
  if (e.host == host_name())
    out += rundir::process_alive(e.pid) ? ": alive" : ": dead";
  return out;
}

// What the files of a run say when its coordinator does not answer.
std::string files_text(const std::string& run, const Style& style) {
  std::string out = fmt::format("run {}\n  {}\n", run, coordinator_text(run));
  const auto metrics = rundir::read_lines(rundir::metrics_path(run));
  const auto last =
      rundir::parse_metrics_line(metrics.empty() ? "" : metrics.back());
  out += last.ok() ? "  last finished: " +
                         step_line(last.value(), last.value().step()) + "\n"
                   : "  no finished step\n";
  const auto lines = rundir::read_lines(rundir::events_path(run));
  pb::JobStatus status;
  for (const std::string& line : lines)
    if (const auto e = rundir::parse_event_line(line); e.ok())
      *status.add_events() = e.value();
  return out + events_text(status, style);
}

Result<int> show(const Options& o, bool clear) {
  const Style style = style_of_stdout();
  ASSIGN_OR_RETURN(const Target target, find_target(o.run));
  const auto status = send_command(target, pb::Command());
  std::string text;
  if (status.ok()) {
    text = o.json ? status_json(*status) : status_text(*status, style);
  } else if (!target.run_dir.empty() && !o.json) {
    text = files_text(target.run_dir, style);
  }
  if (!text.empty()) fmt::print("{}{}", clear ? "\x1b[H\x1b[J" : "", text);
  std::fflush(stdout);
  RETURN_IF_ERROR(status.status());
  return kExitOk;
}

int status(const Options& o) {
  const bool clear = o.watch && stdout_is_terminal();
  int code = exit_code(show(o, clear));
  while (o.watch && code != kExitUsage) {
    std::this_thread::sleep_for(kWatchInterval);
    code = exit_code(show(o, clear));
  }
  return code;
}

}  // namespace

void add_status_verb(CLI::App* app, int* code) {
  auto o = std::make_shared<Options>();
  CLI::App* c = app->add_subcommand("status", "Show a run");
  add_run_option(c, &o->run);
  c->add_flag("-w,--watch", o->watch, "Refresh every second");
  c->add_flag("--json", o->json, "Print JSON");
  c->footer(R"(
Examples:
  remesh status
  remesh status runs/books-20261121-161810 -w
  remesh status tcp://head:5710 --json

Exit code 3 if the coordinator does not answer; the run's files are shown then.)");
  c->callback([o, code] { *code = status(*o); });
}

}  // namespace remesh::ctl
