// Verbs about runs as a whole: ls, wait.
#include <fmt/format.h>

#include <memory>

#include "coordinator/ctl/client.h"
#include "coordinator/ctl/render.h"
#include "coordinator/ctl/screen.h"
#include "coordinator/ctl/status_view.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/known_runs.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "proto/base/clock.h"
#include "proto/base/text.h"
#include "proto/rundir/file_tail.h"

namespace remesh::ctl {
namespace {

// A run by its files alone.
struct Row {
  std::string run;
  std::string state;  // "training", or as of JobStatus
  int64_t step = 0;
  double loss = 0;
  double heard = 0;  // unix seconds of its last step or event
  int pid = 0;       // of the coordinator; 0: none here
};

Row row_of(const std::string& run) {
  Row out{.run = run, .pid = rundir::RunLock::holder(run)};
  const auto end = rundir::end_of_run(run);
  out.state =
      out.pid > 0
          ? "training"
          : rundir::state_text(end ? end->outcome : pb::JobStatus::NOT_RUNNING);
  const auto last = rundir::parse_metrics_line(
      rundir::read_last_line(rundir::metrics_path(run)));
  if (last.ok()) {
    out.step = last->step();
    out.loss = last->loss();
    out.heard = last->time();
  }
  if (end) out.heard = end->time;
  return out;
}

int list_runs(bool json) {
  std::vector<Row> rows;
  for (const std::string& run : rundir::known_runs())
    rows.push_back(row_of(run));
  const double now = unix_seconds();
  if (json) {
    auto array = nlohmann::ordered_json::array();
    for (const Row& r : rows)
      array.push_back({{"run_dir", r.run},
                       {"state", r.state},
                       {"step", r.step},
                       {"loss", or_null(r.step > 0, r.loss)},
                       {"time", or_null(r.heard > 0, r.heard)},
                       {"pid", or_null(r.pid > 0, r.pid)}});
    print_json({{"runs", std::move(array)}});
    return kExitOk;
  }
  std::vector<std::vector<std::string>> cells = {
      {"state", "step", "loss", "age", "pid", "run"}};
  for (const Row& r : rows)
    cells.push_back({r.state, std::to_string(r.step),
                     r.step > 0 ? fmt::format("{:.4f}", r.loss) : "-",
                     r.heard > 0 ? format_duration(now - r.heard) : "-",
                     r.pid > 0 ? std::to_string(r.pid) : "-",
                     rundir::short_path(r.run)});
  fmt::print("{}", rows.empty() ? "no run is known on this host\n"
                                : fold(table(cells), style_of_stdout().width));
  return kExitOk;
}

struct WaitOptions {
  std::string run;
  int64_t step = 0;  // 0: the end
  bool json = false;
};

int code_of(const pb::JobStatus& s, int64_t step) {
  if (step > 0 && s.step() >= step) return kExitOk;
  return s.state() == pb::JobStatus::DONE     ? kExitOk
         : s.state() == pb::JobStatus::FAILED ? kExitFailed
                                              : kExitEnded;
}

// Asks the coordinator, because a run may be on another host, and reads the
// files when there is none: it exits soon after the end of the job.
Result<int> wait_for_run(const WaitOptions& o) {
  ASSIGN_OR_RETURN(const Target target, find_target(o.run));
  const std::string run =
      target.run_dir.empty() ? target.address : target.run_dir;
  constexpr int64_t kGoneMs = 10'000;  // a coordinator may be restarted
  int64_t gone_since_ms = -1;
  pb::JobStatus status;
  CommandClient ending(run);
  for (;;) {
    auto now = next_status(run, &ending);
    if (now.ok()) {
      status = std::move(*now);
    } else if (!target.run_dir.empty()) {
      status = status_of_files(run);
    }
    if (has_ended(status.state()) || (o.step > 0 && status.step() >= o.step))
      break;
    if (now.ok() || gone_since_ms < 0)
      gone_since_ms = now.ok() ? -1 : monotonic_ms();
    if (!now.ok() && monotonic_ms() - gone_since_ms > kGoneMs)
      return now.status();
  }
  if (o.json)
    fmt::print("{}", status_json(status, facts_of_run(status)));
  else
    fmt::print("{}: {} at step {}\n", rundir::short_path(run),
               rundir::state_text(status.state()), status.step());
  return code_of(status, o.step);
}

}  // namespace

void add_list_verbs(CLI::App* app, int* code) {
  auto json = std::make_shared<bool>(false);
  CLI::App* ls = app->add_subcommand(
      "ls", "List the runs of this host: state, step, loss, age, process");
  add_json_option(ls, json.get());
  ls->footer(R"(
Runs that this user has started here, wherever their directories are, and those
in ./runs.

Example:
  remesh ls --json)");
  ls->callback([json, code] { *code = list_runs(*json); });

  auto o = std::make_shared<WaitOptions>();
  CLI::App* c =
      app->add_subcommand("wait", "Wait until a run has ended or made a step");
  c->add_option("--step", o->step, "Return once this step is finished")
      ->check(CLI::Range(int64_t{1}, INT64_MAX));
  add_json_option(c, &o->json);
  add_client_options(c, &o->run);
  c->footer(R"(
Examples:
  remesh wait runs/books
  remesh wait runs/books --step 1000

Exit code 0 if the run is done or the step is finished, 3 if it has failed, 4 if
it was stopped before or has no coordinator any more.)");
  c->callback([o, code] { *code = exit_code(wait_for_run(*o)); });
}

}  // namespace remesh::ctl
