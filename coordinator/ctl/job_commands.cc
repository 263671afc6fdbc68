// Verbs that need no run: plan, job check, job defaults, data.
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <thread>

#include "coordinator/ctl/children.h"
#include "coordinator/ctl/plan_view.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/job_files.h"
#include "proto/base/process.h"

namespace remesh::ctl {
namespace {

Result<int> plan(PlanOptions o) {
  ASSIGN_OR_RETURN(const pb::Job job,
                   rundir::load_resolved({o.job_file, o.set}));
  if (o.cores == 0)
    o.cores =
        static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  ASSIGN_OR_RETURN(const std::string text, plan_text(job, o));
  fmt::print("{}", text);
  return kExitOk;
}

Result<int> job_check(const std::string& job_file,
                      const std::vector<std::string>& set) {
  ASSIGN_OR_RETURN(const pb::Job job, rundir::load_resolved({job_file, set}));
  fmt::print("{}", jobfile::to_toml(job));
  return kExitOk;
}

// Becomes remesh-data; returns only if that fails.
Result<int> data(const std::vector<std::string>& arguments) {
  ASSIGN_OR_RETURN(const std::string program, program_beside("remesh-data"));
  std::vector<std::string> argv = {program};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  std::vector<char*> raw;
  for (std::string& a : argv) raw.push_back(a.data());
  raw.push_back(nullptr);
  execv(raw[0], raw.data());
  return errno_error("start " + program, errno);
}

void add_plan(CLI::App* app, int* code) {
  auto o = std::make_shared<PlanOptions>();
  CLI::App* c = app->add_subcommand(
      "plan", "Show the mesh that a job would get, and its memory use");
  add_job_options(c, &o->job_file, &o->set);
  c->add_option("--slots", o->slots, "Slots of each host")
      ->check(integer_in(1, 65536))
      ->capture_default_str();
  c->add_option("--hosts", o->hosts, "Number of identical hosts")
      ->check(integer_in(1, 65536))
      ->capture_default_str();
  c->add_option("--layout", o->layout,
                "Use this mesh instead of selecting one");
  c->add_option("--cores", o->cores,
                "Cores of each host. Default: those of this machine")
      ->check(integer_in(1, 65536));
  c->add_option("--memory-gib", o->memory_gib,
                "Memory of each host. Default: not checked")
      ->check(CLI::Range(0.0, 1e9));
  c->footer(R"(
Examples:
  remesh plan job.toml --slots 4
  remesh plan job.toml --slots 8 --hosts 4 --memory-gib 64
  remesh plan job.toml --slots 4 --layout pp2,tp2 --set train.recompute=full

Exit code 2 or 3, with the reason, if no mesh can run the job there.)");
  c->callback([o, code] { *code = exit_code(plan(*o)); });
}

void add_job(CLI::App* app, int* code) {
  CLI::App* job = app->add_subcommand("job", "Check and create job files");
  job->require_subcommand(1);
  struct Options {
    std::string job_file;
    std::vector<std::string> set;
  };
  auto o = std::make_shared<Options>();
  CLI::App* check =
      job->add_subcommand("check", "Print a job file with all values resolved");
  add_job_options(check, &o->job_file, &o->set);
  check->footer("\nExample:\n  remesh job check job.toml --set train.steps=50");
  check->callback(
      [o, code] { *code = exit_code(job_check(o->job_file, o->set)); });
  CLI::App* defaults = job->add_subcommand(
      "defaults", "Print a job file with every key, its default and its help");
  defaults->footer("\nExample:\n  remesh job defaults > job.toml");
  defaults->callback([] { fmt::print("{}", jobfile::commented_example()); });
}

}  // namespace

void add_job_verbs(CLI::App* app, int* code) {
  add_plan(app, code);
  add_job(app, code);
  // All arguments go to remesh-data, --help included.
  CLI::App* c = app->add_subcommand("data", "Prepare text for training");
  c->prefix_command();
  c->set_help_flag();
  c->callback([c, code] { *code = exit_code(data(c->remaining())); });
}

}  // namespace remesh::ctl
