// remesh-worker: a daemon that offers this machine's slots to a training run.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "checkpoint/memory/state_info.h"
#include "proto/base/exit_code.h"
#include "proto/base/file_system.h"
#include "proto/base/json_output.h"
#include "proto/base/process.h"
#include "proto/base/sharing.h"
#include "proto/base/text.h"
#include "proto/base/usage.h"
#include "proto/base/version.h"
#include "worker/agent/shell/address.h"
#include "worker/agent/shell/scratch.h"
#include "worker/agent/shell/worker.h"

namespace remesh::agent {
namespace {

constexpr const char* kExamples = R"(
Examples:
  remesh-worker --connect /shared/runs/llama --slots 1 --name node7
  remesh-worker --connect tcp://10.0.0.1:5710 --slots 4 --key worker.key
      where the run directory cannot be seen; remesh key new makes the key
  remesh-worker --connect /shared/runs/llama --interface 10.0.0.0/24

SIGTERM or Ctrl-C: the worker leaves after the current step; no work is
lost. A second one: it leaves immediately. While no coordinator answers, the
worker says why and keeps trying.

)";

int fail(int code, const std::string& message) {
  std::fprintf(stderr, "remesh-worker: %s\n", message.c_str());
  return code;
}

void add_options(CLI::App& app, WorkerOptions& o, std::string* group) {
  app.add_option("--connect", o.connect,
                 "Coordinator: tcp://HOST:PORT or ipc:///PATH, or its run "
                 "directory");
  app.add_option("--slots", o.slots, "Ranks that fit on this machine")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--name", o.name,
                 "Name of this worker, unique in the run; default: the host's "
                 "name, with -2, -3, ... when several run on one host");
  app.add_option("--host-name", o.host_name,
                 "Name of this host, as other workers see it");
  app.add_option("--job", o.job, "Refuse coordinators of other jobs");
  app.add_option("--scratch", o.scratch,
                 "Folder for temporary files; default: /tmp/remesh-<uid>")
      ->envname("REMESH_SCRATCH");
  app.add_option(
      "--scratch-name", o.scratch_name,
      "Folder in --scratch, unique on this host; default: NAME. Lets "
      "workers of several runs have the same --name");
  app.add_option("--state-folder", o.state_folder,
                 "Folder for the training states and for MPI's shared memory: "
                 "a tmpfs, such as another mount in a container whose /dev/shm "
                 "is small; default: /dev/shm");
  app.add_option("--log", o.log,
                 "Log file; default: standard error, then "
                 "RUN/logs/worker-NAME.log");
  app.add_option("--group", *group,
                 "Group that may use what this worker and its ranks write to "
                 "the run directory, as given to the coordinator; default: "
                 "this user alone");
  app.add_option("--interface", o.interface,
                 "Network interfaces or CIDRs for MPI between hosts, "
                 "comma-separated, which must meet those of the other hosts; "
                 "default: the one used to reach the coordinator");
  app.add_option(
      "--mpi-ports", o.mpi_ports,
      "Ports FIRST-LAST on which the ranks listen for ranks of other "
      "workers, some 20 for each slot; default: any");
  app.add_option("--wireguard", o.wireguard,
                 "Encrypt and authenticate MPI between hosts: make a WireGuard "
                 "interface that listens on this UDP port (0: any) and carries "
                 "it. All workers of the job need it, and root or the "
                 "capability CAP_NET_ADMIN")
      ->check(CLI::Range(0, 65535));
  app.add_option("--key,--secret", o.key,
                 "File of this worker's key, or of a job secret that admits "
                 "it (see remesh key). Default: the key in the run directory");
  app.add_option("--server-key", o.server_key,
                 "The coordinator's public key, or a file with it. Default: "
                 "that in the run directory, or in the key file");
  app.add_flag("--no-auth", o.no_auth,
               "Without keys, like the coordinator: for a network without "
               "strangers");
  app.add_option("--trainer", o.trainer,
                 "Path of remesh-trainer; default: next to this program");
}

struct CleanOptions {
  bool clean = false;
  bool all = false;
  bool dry_run = false;
  bool json = false;
};

// `remesh clean` runs this program for it.
void add_clean_options(CLI::App& app, CleanOptions* o) {
  app.add_flag("--clean", o->clean,
               "Instead of working: list the training states that dead workers "
               "left in the memory of this host, and remove those that are no "
               "longer kept");
  app.add_flag("--all", o->all,
               "With --clean: remove all that no process uses; runs whose "
               "newest state they are go back to a checkpoint");
  app.add_flag("--dry-run", o->dry_run, "With --clean: remove nothing");
  app.add_flag("--json", o->json, "With --clean: print JSON");
}

int clean(const CleanOptions& o, const std::string& state_folder) {
  const std::string shared =
      state_folder.empty() ? kSharedMemory : state_folder;
  if (!is_folder(shared)) {
    print_error(fmt::format(
        "remesh-worker: --state-folder {}: no such folder\n", shared));
    return kExitNotFound;
  }
  std::string rows;
  auto states = nlohmann::ordered_json::array();
  for (const Leftover& l : clean_host(o.all, o.dry_run, shared)) {
    const int64_t left_s = memory::kStateKeptS - l.age_s;
    const std::string state = l.removed ? "removed"
                              : l.alive ? "in use"
                              : left_s > 0
                                  ? fmt::format("kept for {} s", left_s)
                                  : "no longer kept";
    rows += fmt::format("{:>10}  step {:<9} {:<16} {}\n", format_bytes(l.bytes),
                        l.step, state, l.owner.empty() ? l.folder : l.owner);
    states.push_back({{"folder", l.folder},
                      {"owner", l.owner},
                      {"bytes", l.bytes},
                      {"step", l.step},
                      {"age_s", l.age_s},
                      {"alive", l.alive},
                      {"removed", l.removed}});
  }
  if (o.json)
    print_json({{"states", std::move(states)}});
  else
    fmt::print("{}", rows.empty() ? "no states on this host\n" : rows);
  return kExitOk;
}

int worker_main(int argc, char** argv) {
  WorkerOptions options;
  CLI::App app{"Offers this machine's slots to a training run."};
  app.name("remesh-worker");
  app.footer(kExamples + std::string(kExitCodesHelp));
  app.set_version_flag("--version", version_line("remesh-worker"));
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  std::string group;
  add_options(app, options, &group);
  CleanOptions cleaning;
  add_clean_options(app, &cleaning);
  if (const auto ended = parse_arguments(app, argc, argv)) return *ended;
  if (cleaning.clean) return clean(cleaning, options.state_folder);
  if (options.connect.empty())
    return fail(kExitUsage, "--connect is required; see remesh-worker --help");
  for (const auto& [key, name] : {std::pair{"--name", options.name},
                                  {"--host-name", options.host_name},
                                  {"--scratch-name", options.scratch_name}})
    if (!name.empty() && !valid_name(name))
      return fail(kExitUsage,
                  std::string(key) + " '" + name +
                      "': must be 1-64 of [A-Za-z0-9._-], starting with "
                      "a letter or digit");
  if (options.trainer.empty()) {
    const auto trainer = program_beside("remesh-trainer");
    if (!trainer.ok()) return exit_with("remesh-worker", trainer.status());
    options.trainer = *trainer;
  }
  raise_file_limit();  // the ranks have connections to their peers
  if (const Status s = share_new_files(group); !s.ok())
    return exit_with("remesh-worker", s);
  auto worker = Worker::make(options);
  if (!worker.ok()) {
    const int code = exit_with("remesh-worker", worker.status());
    // Room may be made, and the service manager starts the worker again.
    return worker.status().code() == Code::kExhausted ? kExitTryAgain : code;
  }
  const int code = (*worker)->run();
  const std::string message = (*worker)->exit_message();
  if (!message.empty() && code != 0) return fail(code, message);
  return code;
}

}  // namespace
}  // namespace remesh::agent

int main(int argc, char** argv) {
  remesh::begin_program();
  return remesh::agent::worker_main(argc, argv);
}
