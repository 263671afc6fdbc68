// Launcher: executes the agent's actions on ranks. It starts the ranks of a
// generation under the PMIx server, watches them and their boards, and kills,
// reaps and cleans up.
//
// It makes no decisions. Its methods correspond to the agent's actions, and it
// reports what happens as the agent's events through `sink`, possibly from
// within a call. There is one generation at a time, as the agent guarantees.
//
// Threads: belongs to the thread of its Loop, which must live as long as the
// daemon, since ranks die with the thread that started them. Other threads
// access the run directory, so that storage that hangs does not stop the loop.
// The destructor kills and reaps the ranks that still run.
#pragma once

#include <fcntl.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proto/base/blocking_calls.h"
#include "proto/base/log.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"
#include "proto/wire/loop.h"
#include "worker/agent/core/agent.h"
#include "worker/agent/shell/flight_report.h"
#include "worker/agent/shell/pmix_daemon.h"
#include "worker/agent/shell/rank_env.h"
#include "worker/agent/shell/rank_logs.h"
#include "worker/agent/shell/scratch.h"
#include "worker/agent/shell/wireguard.h"
#include "worker/board/board.h"

namespace remesh::agent {

struct LauncherOptions {
  std::string worker;   // name
  std::string trainer;  // path of remesh-trainer
  int cores = 1;
  // Interfaces or CIDRs for MPI between hosts; "": not known.
  std::string tcp_interfaces;
  PortRange ports;                 // for MPI between workers
  WireGuard* wireguard = nullptr;  // carries MPI between hosts, if not null
  int keep_generations = 20;       // their logs, traces and flight records
  // Called when PMIx is stuck and no rank lives; restarts the daemon, unless
  // that needs no ranks any more. If empty, every later spawn() fails.
  std::function<void()> restart;
};

class Launcher {
 public:
  using Sink = std::function<void(Event)>;

  // Starts the PMIx server. `scratch` and `loop` must outlive the launcher.
  static Result<std::unique_ptr<Launcher>> make(LauncherOptions options,
                                                Scratch* scratch,
                                                wire::Loop* loop, Sink sink);
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  void set_logger(std::shared_ptr<Logger> logger) { log_ = std::move(logger); }
  // Takes effect with the next generation.
  void set_tcp_interfaces(const std::string& interfaces) {
    options_.tcp_interfaces = interfaces;
  }

  // --- the agent's actions
  // Emits RankStarted for each rank that starts, then SpawnFailed if one did
  // not. `state_job` identifies the states that the ranks keep in shared
  // memory; 0: none. REQUIRES: the previous generation was torn down.
  void spawn(const pb::Assignment& assignment, uint64_t state_job = 0);
  void kill(int64_t generation);
  // Emits TornDown. REQUIRES: every rank is reaped.
  void tear_down(int64_t generation);
  void complete_fence(int64_t generation, int64_t index,
                      const std::string& blob);
  void set_request(uint32_t bits, int64_t checkpoint_request);

  // --- for the loop's tick
  // Renews the daemon's heartbeat on the boards. Returns whether a step was
  // committed since the last samples().
  bool beat(int64_t now_ms);
  // Samples of the living ranks' boards and /proc; pops their steps.
  std::vector<RankSample> samples();
  // Reaps ranks that have ended; emits RankExited. The loop calls it by itself
  // unless the kernel lacks pidfd.
  void reap();

  bool running() const { return !ranks_.empty(); }
  bool idle() const { return generation_ == 0; }
  // Kills and reaps all ranks and tears down without events, at daemon exit.
  void shut_down();

 private:
  static constexpr int64_t kStorageGraceMs = 1000;
  struct Rank {
    int rank = 0;
    pid_t pid = 0;
    int pidfd = -1;
    std::unique_ptr<board::Board> board;
    int64_t seen_committed = -1;
    RankLogPaths logs;
  };

  Launcher(LauncherOptions options, Scratch* scratch, wire::Loop* loop,
           Sink sink);
  // On failure `failed` is the rank concerned, if any.
  Status start_generation(const pb::Assignment& assignment, int* failed);
  Status start_rank(const pb::Assignment& assignment,
                    const LocalPlacement::Local& local,
                    const LocalPlacement& placement,
                    const Scratch::Generation& folders,
                    const std::string& log_folder, const RankOutputs& outputs,
                    const std::vector<std::string>& pmix_env);
  void on_pmix();
  // Returns the data for its flight record; `ended` is "" after exit code 0.
  FlightAbout on_exit(Rank& rank, int wait_status);
  // Says what the kernel did. An end without an error before the rank was to
  // stop is a failure: its program is not the trainer, or does not wait for it.
  void explain_end(RankExited* e) const;
  void keep_flight(const std::string& folder, const FlightAbout& about,
                   const board::Board& board, int64_t died_ns);
  std::shared_ptr<RankOutputs> open_outputs(const LocalPlacement& placement,
                                            const std::string& local,
                                            std::string* logs);
  std::vector<std::string> tail_of(const RankLogPaths& logs);
  // "" if the networks of all workers are connected now.
  std::string connect_networks(const FenceNetworks& fence);
  void kill_all();
  void forget_generation();
  void restart_if_stuck();
  RankSample sample(Rank& rank, bool alive);

  LauncherOptions options_;
  Scratch* scratch_;
  wire::Loop* loop_;
  Sink sink_;
  std::shared_ptr<Logger> log_;
  BlockingCalls storage_{kStorageGraceMs};  // on files of the run directory
  std::unique_ptr<PmixServer> pmix_;
  bool cma_ = true;
  // Of the program as it was when this worker began.
  const int trainer_fd_ =
      ::open(options_.trainer.c_str(), O_RDONLY | O_CLOEXEC);
  std::vector<std::string> base_env_;

  // The current generation; 0: none.
  int64_t generation_ = 0;
  pb::Mesh mesh_;
  std::string run_dir_;
  std::string host_;        // of this worker, from the assignment
  bool killed_ = false;     // this worker killed the ranks
  uint64_t oom_kills_ = 0;  // when the ranks were started
  // How long a result from shared storage is awaited; less than a silence that
  // counts as death.
  int64_t storage_patience_ms_ = 0;
  int64_t exec_until_ms_ = 0;  // until when the programs of ranks are awaited
  uint64_t state_job_ = 0;     // from spawn(); 0: no states are kept
  // Why ranks cannot reach those of another worker; "" as far as known.
  std::string apart_;
  // Absent: all ranks are of this worker.
  std::optional<MpiNetwork> network_;
  std::string space_;          // PMIx namespace; "" if not registered
  std::map<int, Rank> ranks_;  // those not reaped yet
};

}  // namespace remesh::agent
