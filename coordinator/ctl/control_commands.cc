// Verbs that change a running job: drain, mesh, scale, stop.
#include <fmt/format.h>

#include <charconv>
#include <memory>

#include "coordinator/ctl/client.h"
#include "coordinator/ctl/exit.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/line_file.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"

namespace remesh::ctl {
namespace {

struct Options {
  std::string argument;  // the worker, layout or number of slots
  std::string run;
};

int drain(const Options& o) {
  pb::Command command;
  command.set_kind(pb::Command::DRAIN);
  command.set_worker(o.argument);
  const auto status = send_command(o.run, command);
  if (!status.ok()) return fail(status.status());
  fmt::print("worker {} leaves after the current step\n", o.argument);
  return kExitOk;
}

int mesh(const Options& o) {
  pb::Command command;
  command.set_kind(pb::Command::MESH);
  command.set_layout(o.argument);
  const auto status = send_command(o.run, command);
  if (!status.ok()) return fail(status.status());
  if (status.value().pinned().empty()) {
    fmt::print("the mesh is selected automatically again\n");
  } else {
    fmt::print(
        "mesh {} from the next step boundary, until another is requested or "
        "there are not enough slots\n",
        status.value().pinned());
  }
  return kExitOk;
}

int scale(const Options& o) {
  int slots = 0;
  const char* end = o.argument.data() + o.argument.size();
  const auto [at, error] = std::from_chars(o.argument.data(), end, slots);
  const bool is_number = error == std::errc() && at == end && slots >= 1;
  if (o.argument != "all" && !is_number)
    return fail(invalid_argument(
        fmt::format("invalid slot count '{}': expected a positive integer or "
                    "'all'",
                    o.argument)));
  pb::Command command;
  command.set_kind(pb::Command::SCALE);
  command.set_slots(slots);
  const auto status = send_command(o.run, command);
  if (!status.ok()) return fail(status.status());
  if (status.value().scale() == 0) {
    fmt::print("all slots are used from the next step boundary\n");
  } else {
    fmt::print(
        "up to {} slots are used from the next step boundary; others are "
        "spares\n",
        status.value().scale());
  }
  return kExitOk;
}

// How the job ended according to its last event; "" if it did not. The
// coordinator exits soon after the end of the job.
std::string outcome_in_events(const std::string& run_dir, int64_t* step) {
  const auto events = rundir::read_lines(rundir::events_path(run_dir));
  const auto last =
      rundir::parse_event_line(events.empty() ? "" : events.back());
  for (const std::string state : {"done", "failed", "stopped"}) {
    if (!last.ok() || last.value().event() != "job_" + state) continue;
    *step = last.value().step();
    return state;
  }
  return "";
}

int stop(const Options& o) {
  pb::Command command;
  command.set_kind(pb::Command::STOP);
  auto status = send_command(o.run, command);
  if (!status.ok()) return fail(status.status());
  const std::string run_dir = status.value().run_dir();
  std::string state = status.value().state();
  int64_t step = status.value().step();
  while (!has_ended(state)) {
    wait_for_next_poll();
    status = send_command(o.run, pb::Command());
    if (status.ok()) {
      state = status.value().state();
      step = status.value().step();
    } else if (rundir::RunLock::holder(run_dir) == 0) {
      state = outcome_in_events(run_dir, &step);
      if (state.empty()) return fail(status.status());
    }
  }
  fmt::print("the job is {} at step {}\n", state, step);
  return state == "failed" ? kExitFailed : kExitOk;
}

struct Verb {
  const char* name;
  const char* help;
  const char* argument;  // nullptr: none
  const char* argument_help;
  const char* footer;
  int (*run)(const Options&);
};

constexpr Verb kVerbs[] = {
    {"drain", "Let a worker finish its step and leave; the others continue",
     "WORKER", "Its name, as shown by `remesh status`", R"(
Example:
  remesh drain node7)",
     drain},
    {"mesh", "Change to another mesh at the next step boundary", "LAYOUT",
     "Parallel degrees such as dp2,pp2,tp2,cp2 (1 if left out), or auto: "
     "select the mesh automatically again",
     R"(
Examples:
  remesh mesh dp1,tp2
  remesh mesh pp2 runs/latest
  remesh mesh auto

No step is lost. The mesh is kept until another is requested or there are not
enough slots for it.)",
     mesh},
    {"scale", "Limit the number of slots in use; the others are spares",
     "SLOTS", "A positive integer, or 'all' for no limit", R"(
Examples:
  remesh scale 2
  remesh scale all runs/latest

The mesh changes at the next step boundary and no step is lost. A restarted
coordinator keeps the limit.)",
     scale},
    {"stop", "Save a checkpoint and stop the job; waits until it has stopped",
     nullptr, nullptr, R"(
Example:
  remesh stop runs/latest)",
     stop},
};

}  // namespace

void add_control_verbs(CLI::App* app, int* code) {
  for (const Verb& verb : kVerbs) {
    auto o = std::make_shared<Options>();
    CLI::App* c = app->add_subcommand(verb.name, verb.help);
    if (verb.argument != nullptr)
      c->add_option(verb.argument, o->argument, verb.argument_help)->required();
    add_run_option(c, &o->run);
    c->footer(verb.footer);
    c->callback([o, code, run = verb.run] { *code = run(*o); });
  }
}

}  // namespace remesh::ctl
