// remesh-trainer: the process of one rank. The worker daemon starts it with a
// serialized RankSpec and a board (worker/board). For experiments it also runs
// under mpirun or alone, without a board.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <ctime>
#include <exception>
#include <fstream>
#include <memory>
#include <optional>

#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/base/machine.h"
#include "proto/base/process.h"
#include "proto/base/socket_guard.h"
#include "proto/base/usage.h"
#include "proto/base/version.h"
#include "worker/train/pinning.h"
#include "worker/train/trainer.h"
#include "worker/train/watchdog.h"

namespace remesh::train {
namespace {

struct Arguments {
  std::string spec;
  int board_fd = -1;
};

// The start time of this process on the monotonic clock, in ms; the current
// time if /proc does not have it.
int64_t process_start_ms() {
  const int64_t now = monotonic_ms();
  const auto stat = read_proc_stat(getpid());
  if (!stat) return now;
  timespec boot{};
  clock_gettime(CLOCK_BOOTTIME, &boot);
  const int64_t boot_ms = boot.tv_sec * 1000 + boot.tv_nsec / 1'000'000;
  const int64_t age = boot_ms - static_cast<int64_t>(stat->start_time) * 1000 /
                                    sysconf(_SC_CLK_TCK);
  return age >= 0 && age < 60'000 ? now - age : now;
}

Result<pb::RankSpec> read_spec(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return errno_error(path, errno);
  pb::RankSpec spec;
  if (!spec.ParseFromIstream(&in) || !spec.has_assignment())
    return corrupt(path + ": not a rank specification");
  return spec;
}

// Prints an error that cannot be logged yet.
int usage_failure(const std::string& text) {
  std::fprintf(stderr, "remesh-trainer: %s\n", text.c_str());
  return kExitUsage;
}

// Pins the process. Call it before any thread is created. Failure costs only
// speed.
void pin(const pb::RankSpec& spec, TrainLog& log) {
  const std::vector<int> cpus =
      cpus_of_rank(spec.assignment(), spec.rank(), allowed_cpus());
  if (cpus.empty()) return;
  const Status pinned = pin_to(cpus);
  if (!pinned.ok())
    log.warn("not_pinned", {{"error", pinned.to_string()}});
  else
    log.info("pinned", {{"cpus", fmt::format("{}", fmt::join(cpus, ","))}});
}

int run(const Arguments& args, int64_t exec_ms) {
  auto spec = read_spec(args.spec);
  if (!spec.ok()) return usage_failure(spec.status().to_string());
  const int64_t generation = spec->assignment().generation();
  const bool has_daemon = args.board_fd >= 0;
  auto board = has_daemon ? board::Board::open(args.board_fd)
                          : board::Board::create(generation, spec->rank());
  if (!board.ok()) return usage_failure(board.status().to_string());
  board::Board& page = **board;
  auto logger = Logger::open({.name = "trainer",
                              .path = spec->log_path(),
                              .to_stderr = spec->log_path().empty()});
  TrainLog log(logger, generation, spec->rank());
  const auto end = [&](ExitCode code, const std::string& reason) {
    page.set_error(reason);
    log.error("failed", {{"code", static_cast<int>(code)}, {"reason", reason}});
    log.flush();
    _exit(code);
  };
  if (has_daemon) pin(*spec, log);
  std::optional<OrphanGuard> guard;
  if (has_daemon)
    guard.emplace(page, [&] {
      end(kExitOrphan,
          "no heartbeat of the daemon and no progress for a minute");
    });
  // Peers would wait for a failed rank, even in MPI_Finalize, and its threads
  // for them. So a failure ends the process before anything is destroyed, and
  // the worker kills the other ranks.
  std::unique_ptr<Trainer> trainer;
  try {
    trainer =
        std::make_unique<Trainer>(std::move(spec).value(), page, log, exec_ms);
    if (const Status s = trainer->run(); !s.ok())
      end(trainer->exit_code(),
          trainer->exit_code() == kExitInternal ? s.to_string() : s.message());
    trainer.reset();
  } catch (const std::exception& e) {
    end(kExitInternal, e.what());
  }
  log.flush();
  return kExitOk;
}

}  // namespace
}  // namespace remesh::train

int main(int argc, char** argv) {
  const int64_t exec_ms = remesh::train::process_start_ms();
  // A rank must not outlive its worker. It stops at the worker's request and
  // ignores signals sent to the process group or service.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGPIPE, SIG_IGN);
  remesh::guard_sockets();  // those of MPI
  CLI::App app(
      "One rank of a generation; started by remesh-worker.\n"
      "Exit codes: see proto/PROTOCOL.md.\n"
      "Example: mpirun -n 2 remesh-trainer --spec rank.spec");
  app.name("remesh-trainer");
  app.set_version_flag("--version", remesh::version_line("remesh-trainer"));
  remesh::train::Arguments args;
  app.add_option("--spec", args.spec, "file with a serialized RankSpec")
      ->required();
  app.add_option("--board-fd", args.board_fd,
                 "inherited descriptor of the board; without it the trainer "
                 "runs standalone");
  if (const auto ended = remesh::parse_arguments(app, argc, argv))
    return *ended;
  if (args.board_fd >= 0) {
    signal(SIGTERM, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    // Must not be inherited by processes that MPI may start.
    fcntl(args.board_fd, F_SETFD, FD_CLOEXEC);
  }
  return remesh::train::run(args, exec_ms);
}
