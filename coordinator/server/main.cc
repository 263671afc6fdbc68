// remesh-coordinator: one job's coordinator daemon.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <utility>

#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/local_core.h"
#include "coordinator/rundir/run_dir.h"
#include "coordinator/server/daemon.h"
#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/base/file_system.h"
#include "proto/base/process.h"
#include "proto/base/sharing.h"
#include "proto/base/usage.h"
#include "proto/base/version.h"
#include "proto/rundir/paths.h"

namespace remesh::server {
namespace {

constexpr const char* kFooter = R"(
Examples:
  remesh-coordinator job.toml
      start a run below the job's dump_folder, for workers on this machine
  remesh key new coordinator head /shared/run
  remesh-coordinator job.toml --bind tcp://0.0.0.0:5710 --run-dir /shared/run
      for workers on other machines: remesh-worker --connect /shared/run, or
      --connect tcp://HOST:5710 --key FILE
  remesh-coordinator job.toml --run-dir /shared/run --resume
      continue a run that has ended or stopped from its newest state

  remesh-coordinator --run-dir /shared/run --resume --set train.steps=2000
      the same without the job file; a run keeps the settings it was given

If the job in the run directory has not ended, the coordinator takes it over,
with or without --resume: running ranks reconnect and lose nothing.

Signals: SIGTERM and SIGINT end the daemon, not the job: the ranks continue, and
the next coordinator on the run directory takes over. `remesh stop` ends the
job.

)";

struct Arguments {
  std::string job_file;
  std::string group;
  DaemonOptions daemon;
};

void declare(CLI::App& app, Arguments* a) {
  DaemonOptions& o = a->daemon;
  app.footer(kFooter + std::string(kExitCodesHelp));
  app.add_option("JOB", a->job_file,
                 "Job file (TOML). May be left out if --run-dir is a run");
  app.add_option("--run-dir", o.run_dir,
                 "Run directory; must be visible to all workers. Default: a "
                 "new one below job.dump_folder; with --resume, the newest");
  app.add_flag("--resume", o.resume,
               "Continue a run that ended from its newest state");
  app.add_flag(
      "--accept-edits", o.accept_edits,
      "Take what somebody has edited in job.toml of the run directory");
  app.add_option("--bind", o.bind,
                 "Address to listen on; ipc:///PATH for no port")
      ->capture_default_str();
  app.add_option("--advertise", o.advertise,
                 "HOST or HOST:PORT that workers connect to, if it differs "
                 "from --bind");
  app.add_option("--group", a->group,
                 "Group that may read the run directory, and write logs and "
                 "checkpoints there: for workers of other users, with the same "
                 "option. Default: this user alone");
  app.add_option("--set", o.set,
                 "section.key=value, overrides the job file; may be repeated")
      ->allow_extra_args(false);
  app.add_flag("--make-keys", o.make_keys,
               "Make the keys of the run if it has none (see remesh key). Done "
               "without being asked if only this machine can connect");
  app.add_flag("--no-auth", o.no_auth,
               "Without keys: whoever reaches the port controls the job. "
               "Workers need --no-auth too");
  app.add_flag("--verbose", o.log_to_stderr, "Log to stderr too");
}

// A disk that is full, a file system that is not there yet, and an address or a
// run that another process has, are no end of the job: whoever supervises the
// daemon starts it again.
int fail(const Status& status) {
  const int code = exit_with("remesh-coordinator", status);
  const bool passes =
      status.code() == Code::kExhausted || status.code() == Code::kIo ||
      status.code() == Code::kAlreadyExists || status.code() == Code::kDenied;
  return passes ? kExitTryAgain : code;
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

Result<int> run(const Arguments& a) {
  DaemonOptions o = a.daemon;
  if (a.job_file.empty() && o.run_dir.empty())
    return invalid_argument("give a job file, or --run-dir of a run");
  RETURN_IF_ERROR(share_new_files(a.group));
  ASSIGN_OR_RETURN(rundir::OpenedJob opened,
                   rundir::open_job({a.job_file, o.set}, o.run_dir, o.resume,
                                    unix_seconds()));
  const rundir::RemovedIfEmpty unused{opened.made ? opened.run : ""};
  RETURN_IF_ERROR(give_to_group(opened.run, a.group));
  // Before a member of the group can put a link there.
  if (!a.group.empty())
    for (const std::string& folder :
         {rundir::traces_path(opened.run),
          rundir::checkpoints_path(opened.run,
                                   opened.job.checkpoint().folder())})
      if (folder.starts_with(opened.run + "/"))
        RETURN_IF_ERROR(posix_file_system()->create_dirs(folder));
  // A restart must not fail because of a file that no step needs.
  auto core = rundir::local_core();
  if (!core.ok())
    print_error(fmt::format("remesh-coordinator: warning: ignores {}\n",
                            core.status().message()));
  else
    o.core = *core;
  o.job = std::move(opened.job);
  o.run_dir = opened.run;
  ASSIGN_OR_RETURN(auto daemon, Daemon::open(std::move(o)));
  fmt::print(
      "run directory: {}\nworkers connect with: remesh-worker --connect {}\n",
      opened.run,
      a.daemon.no_auth
          ? daemon->address() + " --no-auth"
          : fmt::format("{}, or --connect {} --key FILE",
                        rundir::typed_path(opened.run), daemon->address()));
  std::fflush(stdout);
  const int code = daemon->run();
  const std::string message = daemon->message();
  daemon.reset();
  if (code < 0) die_by(-code);
  if (!message.empty()) print_error(message + "\n");
  return code;
}

}  // namespace
}  // namespace remesh::server

int main(int argc, char** argv) {
  remesh::begin_program();
  CLI::App app("Coordinates the workers of one training job.");
  app.name("remesh-coordinator");
  app.set_version_flag("--version", remesh::version_line("remesh-coordinator"));
  remesh::server::Arguments arguments;
  remesh::server::declare(app, &arguments);
  if (const auto ended = remesh::parse_arguments(app, argc, argv))
    return *ended;
  remesh::raise_file_limit();  // a connection per worker
  const auto code = remesh::server::run(arguments);
  return code.ok() ? *code : remesh::server::fail(code.status());
}
