// remesh-coordinator: one job's coordinator daemon.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "coordinator/rundir/job_files.h"
#include "coordinator/server/daemon.h"
#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/base/usage.h"
#include "proto/base/version.h"

namespace remesh::server {
namespace {

constexpr const char* kFooter = R"(
Examples:
  remesh-coordinator job.toml
      start a run below the job's dump_folder, for workers on this machine
  remesh-coordinator job.toml --bind tcp://0.0.0.0:5710 --run-dir /shared/run
      for workers on other machines: remesh-worker --connect tcp://HOST:5710
  remesh-coordinator job.toml --run-dir /shared/run --resume
      continue a run that has ended or stopped from its newest checkpoint

  remesh-coordinator --run-dir /shared/run --resume --set train.steps=2000
      the same without the job file; a run keeps the settings it was given

If the job in the run directory has not ended, the coordinator takes it over,
with or without --resume: running ranks reconnect and lose nothing.

Signals: SIGTERM and SIGINT end the daemon, not the job: the ranks continue, and
the next coordinator on the run directory takes over. `remesh stop` ends the
job.

Exit codes: 0 the job is done or stopped; 2 wrong usage or job file; 3 the job
cannot continue (the last line has the reason); 4 the run had ended and --resume
was not given; 5 a file or run does not exist; 75 restart the daemon.)";

struct Arguments {
  std::string job_file;
  std::string run_dir;
  std::string bind = "tcp://127.0.0.1:0";
  std::string advertise;
  std::vector<std::string> set;
  bool resume = false;
  bool verbose = false;
};

void declare(CLI::App& app, Arguments* a) {
  app.footer(kFooter);
  app.add_option("JOB", a->job_file,
                 "Job file (TOML). May be left out if --run-dir is a run");
  app.add_option("--run-dir", a->run_dir,
                 "Run directory; must be visible to all workers. Default: a "
                 "new one below job.dump_folder; with --resume, the newest");
  app.add_flag("--resume", a->resume,
               "Continue a run that ended from its newest checkpoint");
  app.add_option("--bind", a->bind, "Address to listen on")
      ->capture_default_str();
  app.add_option("--advertise", a->advertise,
                 "HOST or HOST:PORT that workers connect to, if it differs "
                 "from --bind");
  app.add_option("--set", a->set,
                 "section.key=value, overrides the job file; may be repeated")
      ->allow_extra_args(false);
  app.add_flag("--verbose", a->verbose, "Log to stderr too");
}

int fail(const Status& status) {
  return exit_with("remesh-coordinator", status);
}

// Exits as if the signal had not been handled, so that the parent process can
// tell a stopped daemon from an ended job.
[[noreturn]] void die_by(int signal) {
  ::signal(signal, SIG_DFL);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  raise(signal);
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
  _exit(128 + signal);
}

int run(const Arguments& a) {
  if (a.job_file.empty() && a.run_dir.empty())
    return fail(invalid_argument("give a job file, or --run-dir of a run"));
  auto opened = rundir::open_job({a.job_file, a.set}, a.run_dir, a.resume,
                                 unix_seconds());
  if (!opened.ok()) return fail(opened.status());
  auto daemon = Daemon::open({.job = std::move(opened->job),
                              .set = a.set,
                              .run_dir = opened->run,
                              .bind = a.bind,
                              .advertise = a.advertise,
                              .resume = a.resume,
                              .log_to_stderr = a.verbose});
  if (!daemon.ok()) return fail(daemon.status());
  fmt::print(
      "run directory: {}\nworkers connect with: remesh-worker --connect "
      "{}\n",
      opened->run, (*daemon)->address());
  std::fflush(stdout);
  const int code = (*daemon)->run();
  const std::string message = (*daemon)->message();
  daemon->reset();
  if (code < 0) die_by(-code);
  if (!message.empty()) fmt::print(stderr, "{}\n", message);
  return code;
}

}  // namespace
}  // namespace remesh::server

int main(int argc, char** argv) {
  CLI::App app("Coordinates the workers of one training job.");
  app.name("remesh-coordinator");
  app.set_version_flag("--version", remesh::version_line("remesh-coordinator"));
  remesh::server::Arguments arguments;
  remesh::server::declare(app, &arguments);
  remesh::report_usage_in_one_line(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : remesh::kExitUsage;
  }
  return remesh::server::run(arguments);
}
