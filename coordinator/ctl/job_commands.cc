// Verbs that need no run: job check, job defaults, data.
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "coordinator/ctl/preflight.h"
#include "coordinator/ctl/screen.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/job_files.h"
#include "proto/base/child.h"
#include "proto/base/process.h"

namespace remesh::ctl {
namespace {

struct CheckOptions {
  std::string job_file;
  std::vector<std::string> set;
  bool here = false;
  int local_workers = 1;
  int slots_per_worker = 1;
  bool json = false;
};

Result<int> check_here(const pb::Job& job, const CheckOptions& o) {
  const std::vector<Need> needs =
      look_ahead({.job = job,
                  .run_dir = job.job().dump_folder() + "/new",
                  .workers = o.local_workers,
                  .slots_per_worker = o.slots_per_worker});
  print_done(o.json, {{"needs", needs_json(needs)}},
             needs_text(needs, style_of_stdout()));
  return fatal_text(needs).empty() ? kExitOk : kExitFailed;
}

// Absent keys have their defaults.
nlohmann::ordered_json job_json(const pb::Job& job) {
  nlohmann::ordered_json sections;
  for (const auto& [key, value] : jobfile::settings(job)) {
    const size_t dot = key.find('.');
    // TOML writes all values but inf and nan as JSON does.
    auto parsed = nlohmann::ordered_json::parse(value, nullptr, false);
    sections[key.substr(0, dot)][key.substr(dot + 1)] =
        parsed.is_discarded() ? nlohmann::ordered_json(value) : parsed;
  }
  return {{"job", std::move(sections)}};
}

Result<int> job_check(const CheckOptions& o) {
  ASSIGN_OR_RETURN(const pb::Job job,
                   rundir::load_resolved({o.job_file, o.set}));
  if (o.here) return check_here(job, o);
  return print_done(o.json, job_json(job), jobfile::to_toml(job));
}

// Becomes that program of remesh; returns only if that fails.
Result<int> exec_program(const std::string& name,
                         const std::vector<std::string>& arguments) {
  ASSIGN_OR_RETURN(const std::string program, program_beside(name));
  std::vector<std::string> argv = {program};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  execv(program.c_str(), exec_arguments(argv).data());
  return errno_error("start " + program, errno);
}

void add_job(CLI::App* app, int* code) {
  CLI::App* job = app->add_subcommand("job", "Check and create job files");
  job->require_subcommand(1);
  auto o = std::make_shared<CheckOptions>();
  CLI::App* check =
      job->add_subcommand("check", "Print a job file with all values resolved");
  add_job_options(check, &o->job_file, &o->set);
  check->add_flag(
      "--here", o->here,
      "Show instead what the job needs on this machine, and whether "
      "it is there; exit code 3 if not");
  check->add_option("--local", o->local_workers, "With --here: workers")
      ->check(integer_in(0, 4096))
      ->capture_default_str();
  check
      ->add_option("--slots-per-worker", o->slots_per_worker,
                   "With --here: slots of each")
      ->check(integer_in(1, 4096))
      ->capture_default_str();
  add_json_option(check, &o->json);
  check->footer(R"(
Examples:
  remesh job check job.toml --set train.steps=50
  remesh job check job.toml --here --local 4)");
  check->callback([o, code] { *code = exit_code(job_check(*o)); });
  CLI::App* defaults = job->add_subcommand(
      "defaults", "Print a job file with every key, its default and its help");
  defaults->footer("\nExample:\n  remesh job defaults > job.toml");
  add_json_option(defaults, &o->json);
  defaults->callback(
      [o] { print_done(o->json, job_json({}), jobfile::commented_example()); });
}

void add_clean(CLI::App* app, int* code) {
  auto given = std::make_shared<std::vector<std::string>>(1, "--clean");
  CLI::App* c = app->add_subcommand(
      "clean", "List and remove training states left in this host's memory");
  for (const auto& [flag, help] :
       {std::pair{
            "--all",
            "Also those that are still kept: runs whose newest state they "
            "are go back to a checkpoint"},
        {"--dry-run", "Remove nothing"},
        {"--json", "Print JSON"}})
    c->add_flag_function(
        flag,
        [given, flag = flag](int64_t times) {  // negative: --all=false
          if (times > 0) given->emplace_back(flag);
        },
        help);
  c->add_option_function<std::string>(
      "--state-folder",
      [given](const std::string& folder) {
        given->insert(given->end(), {"--state-folder", folder});
      },
      "Where the workers keep their states, if not in /dev/shm");
  c->footer(R"(
A run's states stay in shared memory for ten minutes after its last worker, so
that it can be resumed from them. Workers remove older ones while they run.

Examples:
  remesh clean
  remesh clean --all --dry-run)");
  c->callback([given, code] {
    *code = exit_code(exec_program("remesh-worker", *given));
  });
}

}  // namespace

void add_job_verbs(CLI::App* app, int* code) {
  add_job(app, code);
  // All arguments go to another program, --help included.
  for (const auto& [verb, help] :
       {std::pair{"data", "Prepare text for training"},
        {"tokenizer", "Encode text as tokens, and make tokenizers"},
        {"sample", "Continue a text with a model"},
        {"eval", "Score how well a model predicts text"}}) {
    CLI::App* c = app->add_subcommand(verb, help);
    c->prefix_command();
    c->set_help_flag();
    c->callback([c, code] {
      std::vector<std::string> arguments = c->remaining();
      const std::string name = c->get_name();
      if (name == "tokenizer" || name == "eval")
        arguments.insert(arguments.begin(), name);
      *code = exit_code(exec_program(
          name == "sample" || name == "eval" ? "remesh-sample" : "remesh-data",
          arguments));
    });
  }
  add_clean(app, code);
}

}  // namespace remesh::ctl
