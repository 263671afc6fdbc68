// remesh: the command line.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "coordinator/ctl/commands.h"
#include "coordinator/ctl/run.h"
#include "proto/base/text.h"

namespace remesh::ctl {
namespace {

constexpr const char* kFooter = R"(
Examples:
  remesh data prepare --input books.txt.xz --out data/books
  remesh run job.toml --local 2          train on this machine, 2 workers
  remesh status -w                       watch the newest run
  remesh run job.toml --local 3 --resume go on from its newest checkpoint

RUN is a run directory or an address (tcp://HOST:PORT); left out, it is the
newest run below ./runs. `remesh COMMAND --help` tells more.

Exit codes: 0 done; 2 wrong usage or job file; 3 cannot continue (the reason is
on the last line); 130 interrupted after saving.)";

// Everything the command line can hold.
struct Arguments {
  RunOptions run;
  StatusOptions status;
  CkptOptions ckpt;
  std::string target;
  std::string worker;
  std::string layout;
  std::string slots;
  TraceOptions trace;
  PlanOptions plan;
  std::string job_file;
  std::vector<std::string> set;
  CLI::App* data = nullptr;
  int code = kExitOk;
};

void add_set(CLI::App* app, std::vector<std::string>* set) {
  app->add_option("--set", *set,
                  "section.key=value, wins over the job file; may be repeated")
      ->allow_extra_args(false);
}

void declare_run(CLI::App& app, Arguments* a) {
  CLI::App* c = app.add_subcommand("run", "Train: start a job and follow it");
  RunOptions& o = a->run;
  c->add_option("JOB", o.job_file, "Job file (TOML)")->required();
  c->add_option("--local", o.local_workers,
                "Start this many workers on this machine")
      ->check(CLI::Range(0, 4096));
  c->add_option("--slots-per-worker", o.slots_per_worker,
                "Ranks that each local worker offers room for")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  c->add_flag("--resume", o.resume,
              "Go on with the newest run of this job (or --run-dir) from its "
              "newest checkpoint, with any number of workers");
  c->add_option("--run-dir", o.run_dir,
                "Run directory. Default: a new one below job.dump_folder");
  add_set(c, &o.set);
  c->add_option("--bind", o.bind,
                "Address the coordinator listens on; tcp://0.0.0.0:5710 for "
                "workers on other machines")
      ->capture_default_str();
  c->add_option("--advertise", o.advertise,
                "HOST or HOST:PORT that workers connect to, when it is not the "
                "one bound");
  c->add_flag("--respawn", o.respawn, "Start local workers again that died");
  c->footer(R"(
Examples:
  remesh run job.toml --local 2
  remesh run job.toml --local 2 --set train.steps=500 --set optimizer.lr=3e-4
  remesh run job.toml --local 4 --resume
  remesh run job.toml --bind tcp://0.0.0.0:5710
      starts the coordinator only; start workers on the machines with
      remesh-worker --connect tcp://HOST:5710 --slots N

Workers may join and leave while it runs: remesh-worker --connect RUN.
Ctrl-C saves and stops; a second one kills at once.)");
  c->callback([a] { a->code = run_job(a->run); });
}

void add_target(CLI::App* c, std::string* target) {
  c->add_option("RUN", *target,
                "Run directory or address; default: the newest below ./runs");
}

void declare_control(CLI::App& app, Arguments* a) {
  CLI::App* status = app.add_subcommand("status", "Show a run");
  add_target(status, &a->status.run);
  status->add_flag("-w,--watch", a->status.watch, "Again every second");
  status->add_flag("--json", a->status.json, "For programs");
  status->footer(R"(
Examples:
  remesh status
  remesh status runs/books-20261121-161810 -w
  remesh status tcp://head:5710 --json

Exit code 3 when the coordinator does not answer; what the run's files say is
shown then.)");
  status->callback([a] { a->code = status_command(a->status); });

  CLI::App* drain = app.add_subcommand(
      "drain", "Let a worker finish its step and leave; the others go on");
  drain->add_option("WORKER", a->worker, "Its name, as `remesh status` shows")
      ->required();
  add_target(drain, &a->target);
  drain->footer("\nExample:\n  remesh drain node7");
  drain->callback([a] { a->code = drain_command(a->worker, a->target); });

  CLI::App* mesh = app.add_subcommand(
      "mesh", "Go over to another mesh at the next step boundary");
  mesh->add_option("LAYOUT", a->layout,
                   "Degrees, those left out being 1: dp2,pp2,tp2,cp2; or "
                   "auto: chosen by the slots again")
      ->required();
  add_target(mesh, &a->target);
  mesh->footer(R"(
Examples:
  remesh mesh dp1,tp2
  remesh mesh pp2 runs/latest
  remesh mesh auto

The state is saved and nothing is lost. The mesh stays until another is asked
for, or until there are too few slots for it.)");
  mesh->callback([a] { a->code = mesh_command(a->layout, a->target); });

  CLI::App* scale =
      app.add_subcommand("scale", "Use so many slots, the others are spares");
  scale->add_option("SLOTS", a->slots, "How many; 'all' (or 0): no bound")
      ->required();
  add_target(scale, &a->target);
  scale->footer(R"(
Examples:
  remesh scale 2
  remesh scale all runs/latest

Training goes over to the new mesh at the next step boundary and nothing is
lost. Spares stay ready; a restarted coordinator keeps the number.)");
  scale->callback([a] { a->code = scale_command(a->slots, a->target); });

  CLI::App* checkpoint = app.add_subcommand(
      "checkpoint", "Save after the step under way; waits, prints the path");
  add_target(checkpoint, &a->target);
  checkpoint->footer("\nExample:\n  remesh checkpoint runs/latest");
  checkpoint->callback([a] { a->code = checkpoint_command(a->target); });

  CLI::App* stop = app.add_subcommand(
      "stop", "Save and end the job in order; waits for the end");
  add_target(stop, &a->target);
  stop->footer("\nExample:\n  remesh stop runs/latest");
  stop->callback([a] { a->code = stop_command(a->target); });
}

void declare_plan(CLI::App& app, Arguments* a) {
  PlanOptions& o = a->plan;
  CLI::App* plan = app.add_subcommand(
      "plan", "Show the mesh that a job would get, and its memory");
  plan->add_option("JOB", o.job_file, "Job file (TOML)")->required();
  plan->add_option("--slots", o.slots, "Slots of each host")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  plan->add_option("--hosts", o.hosts, "Hosts, all alike")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  plan->add_option("--layout", o.layout,
                   "This mesh instead of the one that would be chosen");
  plan->add_option("--cores", o.cores,
                   "Cores of each host; default: this machine's")
      ->check(CLI::Range(1, 65536));
  plan->add_option("--memory-gib", o.memory_gib,
                   "Memory of each host; default: not looked at")
      ->check(CLI::Range(0.0, 1e9));
  add_set(plan, &o.set);
  plan->footer(R"(
Examples:
  remesh plan job.toml --slots 4
  remesh plan job.toml --slots 8 --hosts 4 --memory-gib 64
  remesh plan job.toml --slots 4 --layout pp2,tp2 --set train.recompute=full

Exit code 2 or 3 with the reason when no mesh can run the job there.)");
  plan->callback([a] { a->code = plan_command(a->plan); });

  CLI::App* trace = app.add_subcommand(
      "trace", "Make one timeline of the ranks' traces, and say what it shows");
  add_target(trace, &a->trace.run);
  trace->add_option("-o,--output", a->trace.output,
                    "File to write; default: traces/gen-G.json of the run");
  trace->add_option("--generation", a->trace.generation,
                    "Which one; default: the newest that has traces");
  trace->footer(R"(
Examples:
  remesh run job.toml --local 4 --set profile.enable=true
  remesh trace
  remesh trace runs/latest -o timeline.json

Open the file at https://ui.perfetto.dev or chrome://tracing.)");
  trace->callback([a] { a->code = trace_command(a->trace); });
}

void declare_ckpt(CLI::App& app, Arguments* a) {
  CLI::App* ckpt = app.add_subcommand("ckpt", "Look at checkpoints");
  ckpt->require_subcommand(1);
  ckpt->footer(R"(
Examples:
  remesh ckpt list runs/latest
  remesh ckpt inspect runs/latest --step 100
  remesh ckpt verify runs/latest/checkpoints/step-00000100)");
  const auto add = [&](const char* name, const char* help, bool one,
                       int (*command)(const CkptOptions&)) {
    CLI::App* c = ckpt->add_subcommand(name, help);
    c->add_option("RUN_OR_CKPT", a->ckpt.target,
                  "Run directory or one checkpoint; default: the newest run "
                  "below ./runs");
    if (one) {
      c->add_option("--step", a->ckpt.step,
                    "Which one of a run; default: the newest");
    }
    c->add_flag("--json", a->ckpt.json, "For programs");
    c->callback([a, command] { a->code = command(a->ckpt); });
  };
  add("list", "The checkpoints of a run", false, ckpt_list_command);
  add("inspect", "What a checkpoint holds", true, ckpt_inspect_command);
  add("verify", "Read and check every byte; exit code 3 when damaged", true,
      ckpt_verify_command);
}

void declare_files(CLI::App& app, Arguments* a) {
  CLI::App* job = app.add_subcommand("job", "Check job files");
  job->require_subcommand(1);
  CLI::App* check =
      job->add_subcommand("check", "Print the job with every value it gets");
  check->add_option("JOB", a->job_file, "Job file (TOML)")->required();
  add_set(check, &a->set);
  check->footer("\nExample:\n  remesh job check job.toml --set train.steps=50");
  check->callback([a] { a->code = job_check_command(a->job_file, a->set); });
  CLI::App* defaults = job->add_subcommand(
      "defaults", "Print a job file with every key, its default and its help");
  defaults->footer("\nExample:\n  remesh job defaults > job.toml");
  defaults->callback([a] { a->code = job_defaults_command(); });

  // Everything behind "data" is for remesh-data, its --help too.
  a->data = app.add_subcommand("data", "Prepare text for training");
  a->data->prefix_command();
  a->data->set_help_flag();
  a->data->callback([a] { a->code = data_command(a->data->remaining()); });
}

// The names that may stand where `word` does.
std::vector<std::string> allowed_for(const CLI::App& app,
                                     const std::string& word) {
  std::vector<std::string> names;
  if (!word.starts_with("-")) {
    for (const CLI::App* c : app.get_subcommands({})) {
      names.push_back(c->get_name());
    }
    return names;
  }
  for (const CLI::Option* o : app.get_options()) {
    for (const std::string& name : o->get_lnames()) {
      names.push_back("--" + name);
    }
  }
  return names;
}

// Names the first word that is not known, and the nearest one that is.
int usage_error(const CLI::App& root, const CLI::ParseError& error, int argc,
                char** argv) {
  const int code = root.exit(error);
  if (code == 0) return kExitOk;  // help
  const CLI::App* app = &root;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto inner = app->get_subcommands();
    if (!inner.empty() && inner[0]->get_name() == word) {
      app = inner[0];
      continue;
    }
    const auto names = allowed_for(*app, word);
    const std::string plain = word.substr(0, word.find('='));
    const bool known =
        std::find(names.begin(), names.end(), plain) != names.end();
    if (known || names.empty() || word == "-w") continue;
    const std::string near = nearest_name(plain, names);
    fmt::print(stderr, "{}: not known; allowed: {}{}\n", word, join(names),
               near.empty() ? "" : "; did you mean " + near + "?");
    break;
  }
  return kExitUsage;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("remesh trains language models on machines that come and go.");
  app.name("remesh");
  app.footer(kFooter);
  app.require_subcommand(1);
  Arguments arguments;
  declare_run(app, &arguments);
  declare_control(app, &arguments);
  declare_plan(app, &arguments);
  declare_ckpt(app, &arguments);
  declare_files(app, &arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return usage_error(app, e, argc, argv);
  }
  return arguments.code;
}

}  // namespace remesh::ctl

int main(int argc, char** argv) { return remesh::ctl::main(argc, argv); }
