// Verbs that change a running job: drain, uncordon, mesh, scale, stop.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "coordinator/ctl/client.h"
#include "coordinator/ctl/status_view.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "parallel/geometry/layout.h"
#include "proto/base/number.h"
#include "proto/base/text.h"
#include "proto/rundir/events.h"

namespace remesh::ctl {
namespace {

struct ControlOptions {
  std::string argument;  // the worker, layout or number of slots
  std::string run;
  bool discard = false;
  bool wait = false;
  bool json = false;
};

// What a command has done: the job's status then, and a sentence.
struct ControlDone {
  pb::JobStatus status;
  std::string text;
  int code = kExitOk;
};

// The run that a command went to, according to the reply: its directory,
// because a link may name another run by now, or the address that was given if
// the directory cannot be seen from this host.
std::string run_of(const pb::JobStatus& status, const ControlOptions& o) {
  return rundir::is_run(status.run_dir()) ? status.run_dir() : o.run;
}

// The status once `holds` is true of it; with --wait only.
Result<pb::JobStatus> wait_for(const ControlOptions& o, pb::JobStatus status,
                               bool (*holds)(const ControlOptions&,
                                             const pb::JobStatus&)) {
  const std::string run = run_of(status, o);
  for (int silent = 0; o.wait && !holds(o, status);) {
    if (has_ended(status.state()))
      return ended("the job is " + rundir::state_text(status.state()));
    wait_for_next_poll();
    auto now = send_command(run, command_of(pb::Command::STATUS));
    // A coordinator that restarts answers again soon.
    constexpr int kPatience = 10;
    if (!now.ok() && ++silent > kPatience) return now.status();
    if (!now.ok()) continue;
    silent = 0;
    status = std::move(*now);
  }
  return status;
}

bool on_final_mesh(const ControlOptions&, const pb::JobStatus& s) {
  return s.state() == pb::JobStatus::RUNNING && !s.mesh_changes();
}

bool has_left(const ControlOptions& o, const pb::JobStatus& s) {
  return std::ranges::none_of(s.workers(), [&](const pb::WorkerStatus& w) {
    return w.name() == o.argument && w.state() != pb::WorkerStatus::DEAD;
  });
}

// Whether a worker other than that one offers slots.
bool others_work(const pb::JobStatus& s, const std::string& worker) {
  return std::ranges::any_of(s.workers(), [&](const pb::WorkerStatus& w) {
    return w.name() != worker && w.state() != pb::WorkerStatus::DEAD &&
           !w.draining() && w.slots() > 0;
  });
}

Result<ControlDone> drain(const ControlOptions& o) {
  pb::Command command = command_of(pb::Command::DRAIN);
  command.set_worker(o.argument);
  ASSIGN_OR_RETURN(pb::JobStatus status, send_command(o.run, command));
  const bool last = !others_work(status, o.argument);
  ASSIGN_OR_RETURN(status, wait_for(o, std::move(status), has_left));
  return ControlDone{
      std::move(status),
      fmt::format("worker {} {}{}", o.argument,
                  o.wait ? "has left" : "leaves after the current step",
                  last ? "; it is the last one: its state is saved, and "
                         "training waits for another worker"
                       : "")};
}

Result<ControlDone> uncordon(const ControlOptions& o) {
  pb::Command command = command_of(pb::Command::UNCORDON);
  command.set_worker(o.argument);
  ASSIGN_OR_RETURN(pb::JobStatus status, send_command(o.run, command));
  return ControlDone{
      std::move(status),
      fmt::format("ranks may be placed on {} again", o.argument)};
}

// `text`: what is going to happen, without --wait.
Result<ControlDone> change_mesh(const ControlOptions& o,
                                const pb::Command& command,
                                std::string (*text)(const pb::JobStatus&)) {
  ASSIGN_OR_RETURN(pb::JobStatus status, send_command(o.run, command));
  ASSIGN_OR_RETURN(status, wait_for(o, std::move(status), on_final_mesh));
  return ControlDone{status,
                     o.wait ? "training on " + rundir::mesh_text(status.mesh())
                            : text(status)};
}

Result<ControlDone> mesh(const ControlOptions& o) {
  if (o.argument != "auto")
    RETURN_IF_ERROR(geometry::Layout::parse(o.argument).status());
  pb::Command command = command_of(pb::Command::MESH);
  command.set_layout(o.argument);
  return change_mesh(o, command, [](const pb::JobStatus& s) -> std::string {
    if (s.pinned().empty()) return "the mesh is selected automatically again";
    return fmt::format(
        "changing to {} after this step; it stays until you change it or slots "
        "run short (`remesh mesh auto` undoes it)",
        s.pinned());
  });
}

Result<ControlDone> scale(const ControlOptions& o) {
  const int slots = parse_number<int>(o.argument).value_or(0);
  if (o.argument != "all" && slots < 1)
    return invalid_argument(
        fmt::format("invalid slot count '{}': expected a positive integer or "
                    "'all'",
                    o.argument));
  pb::Command command = command_of(pb::Command::SCALE);
  command.set_slots(slots);
  return change_mesh(o, command, [](const pb::JobStatus& s) -> std::string {
    if (s.scale() == 0) return "all slots are used from the next step boundary";
    return fmt::format(
        "up to {} {} used from the next step boundary; others are spares",
        plural(s.scale(), "slot"), s.scale() == 1 ? "is" : "are");
  });
}

// Why the job declined to stop, according to its newest such event.
std::string why_declined(const pb::JobStatus& status) {
  std::string why;
  for (const pb::EventRecord& e : status.events())
    if (e.event() == events::kStopDeclined) why = e.cause();
  return why;
}

Result<ControlDone> stop(const ControlOptions& o) {
  pb::Command command = command_of(pb::Command::STOP);
  command.set_discard(o.discard);
  Connection kept;
  ASSIGN_OR_RETURN(pb::JobStatus status, send_command(o.run, command, &kept));
  const std::string run_dir = status.run_dir();
  const std::string run = run_of(status, o);
  CommandClient ending(run, std::move(kept));
  int64_t heard_ms = monotonic_ms();
  while (!has_ended(status.state())) {
    if (!status.stop_requested())
      return exhausted(fmt::format(
          "not stopped, because the job could not be saved: {}. It continues. "
          "Make room and stop it again, or run `remesh stop --discard` to end "
          "it without saving",
          why_declined(status)));
    auto now = next_status(run, &ending);
    if (now.ok()) {
      status = std::move(*now);
      heard_ms = monotonic_ms();
    } else if (rundir::RunLock::holder(run_dir) == 0) {
      // A coordinator exits soon after the end of the job. One that is started
      // again carries the stop out.
      constexpr int64_t kGoneMs = 10'000;
      if (rundir::end_of_run(run_dir))
        status = status_of_files(run_dir);
      else if (monotonic_ms() - heard_ms > kGoneMs)
        return now.status();
      else
        wait_for_next_poll();
    }
  }
  const auto end = rundir::end_of_run(run_dir);
  return ControlDone{
      status,
      fmt::format("the job is {} at step {}; {}to continue: remesh resume {}",
                  rundir::state_text(status.state()), status.step(),
                  !end || end->detail.empty() ? "" : end->detail + "; ",
                  rundir::typed_path(run_dir)),
      status.state() == pb::JobStatus::FAILED ? kExitFailed : kExitOk};
}

Result<int> perform(const ControlOptions& o,
                    Result<ControlDone> (*run)(const ControlOptions&)) {
  ASSIGN_OR_RETURN(const ControlDone done, run(o));
  fmt::print("{}", o.json ? status_json(done.status, facts_of_run(done.status))
                          : done.text + "\n");
  return done.code;
}

struct ControlVerb {
  const char* name;
  const char* help;
  const char* argument;  // nullptr: none
  const char* argument_help;
  const char* footer;
  Result<ControlDone> (*run)(const ControlOptions&);
};

constexpr ControlVerb kControlVerbs[] = {
    {"drain", "Let a worker finish its step and leave; the others continue",
     "WORKER", "Its name, as shown by `remesh status`", R"(
Example:
  remesh drain node7

To undo it, start the worker again on its host: remesh-worker --connect RUN)",
     drain},
    {"uncordon", "Use a cordoned host again", "HOST",
     "Its name, or that of a worker on it, as shown by `remesh status`", R"(
Example:
  remesh uncordon node7

No ranks are placed on a host that is cordoned: ranks failed there, it was lost
repeatedly, messages between it and another host were lost, or it has too little
room. If ranks fail on only one of its workers, only that worker is cordoned.
`remesh status` shows the reason. A cordon ends by itself, after a time that
doubles with each failure. Use this command when the cause is fixed: the name of
a host ends the cordons of its workers, too.)",
     uncordon},
    {"mesh", "Change the mesh (takes effect after the current step)", "LAYOUT",
     "Parallel degrees such as dp2,pp2,tp2,cp2 (1 if left out), or auto: "
     "select the mesh automatically again",
     R"(
Examples:
  remesh mesh dp1,tp2
  remesh mesh pp2 runs/latest
  remesh mesh auto

No finished step is lost. The mesh stays until you change it or slots run short;
`remesh mesh auto` undoes it.)",
     mesh},
    {"scale", "Limit the run to a number of slots; the rest stand by", "SLOTS",
     "A positive integer, or 'all' for no limit", R"(
Examples:
  remesh scale 2
  remesh scale all runs/latest

The mesh changes at the next step boundary and no step is lost. A restarted
coordinator keeps the limit.)",
     scale},
    {"stop", "Save a checkpoint and stop the job; waits until it has stopped",
     nullptr, nullptr, R"(
Examples:
  remesh stop runs/latest
  remesh stop --discard runs/latest

If the job cannot be saved, for example because the disk is full, it is not
stopped and the exit code is 3. With --discard it ends at once; its newest state
stays in the memory of the workers' hosts for ten minutes.)",
     stop},
};

}  // namespace

void add_control_verbs(CLI::App* app, int* code) {
  for (const ControlVerb& verb : kControlVerbs) {
    auto o = std::make_shared<ControlOptions>();
    CLI::App* c = app->add_subcommand(verb.name, verb.help);
    if (verb.argument != nullptr)
      c->add_option(verb.argument, o->argument, verb.argument_help)->required();
    if (verb.run == stop)
      c->add_flag("--discard", o->discard, "Stop at once, without saving");
    if (verb.run == drain || verb.run == mesh || verb.run == scale)
      c->add_flag("--wait", o->wait, "Return once it has happened");
    add_json_option(c, &o->json);
    add_client_options(c, &o->run);
    c->footer(verb.footer);
    c->callback(
        [o, code, run = verb.run] { *code = exit_code(perform(*o, run)); });
  }
}

}  // namespace remesh::ctl
