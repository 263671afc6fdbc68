// Launcher: the hands of the agent. It starts the ranks of a generation under
// the PMIx server, watches them and their boards, kills, reaps and clears away.
//
// It decides nothing: calls come from the agent's actions, and what happens
// goes out as the agent's events through `sink`, one after another, also from
// within the calls. One generation at a time, as the agent keeps it.
//
// Threads: belongs to the thread of its Loop, which must live as long as the
// daemon (ranks die with it). Destruction kills and reaps what still runs.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

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
#include "worker/board/board.h"

namespace remesh::agent {

struct LauncherOptions {
  std::string worker;   // its name
  std::string trainer;  // path of remesh-trainer
  int cores = 1;
  // Interfaces or CIDRs for MPI between hosts; "": see rank_env.h.
  std::string tcp_interfaces;
  int keep_generation_logs = 20;
  int keep_generation_flights = 20;  // flight records of ranks that died
  // Called when PMIx is stuck and no rank lives; not expected to return. None:
  // spawning fails from then on.
  std::function<void()> start_over;
};

class Launcher {
 public:
  using Sink = std::function<void(Event)>;

  // `scratch` and `loop` outlive it. Starts the PMIx server.
  static Result<std::unique_ptr<Launcher>> make(LauncherOptions options,
                                                Scratch* scratch,
                                                wire::Loop* loop, Sink sink);
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  void set_logger(std::shared_ptr<Logger> logger);
  // Takes effect with the next generation.
  void set_tcp_interfaces(const std::string& interfaces);

  // --- the agent's actions
  // RankStarted for each local rank; or, after those that did start,
  // SpawnFailed. REQUIRES: the generation before is torn down.
  // `state_job`: number of the states that the ranks keep in shared memory; 0:
  // none.
  void spawn(const pb::Assignment& assignment, uint64_t state_job = 0);
  void kill(int64_t generation);
  // REQUIRES: every rank is reaped. Ends with TornDown.
  void tear_down(int64_t generation);
  void complete_fence(int64_t generation, int64_t index,
                      const std::string& blob);
  void set_request(uint32_t bits, int64_t checkpoint_request);

  // --- for the loop's tick
  // Signs of life to the ranks, and whether a step was committed since the
  // last samples().
  bool beat(int64_t now_ms);
  // What the living ranks' boards and /proc show; takes the steps off them.
  std::vector<RankSample> samples();
  // Reaps whatever has ended: RankExited. The loop does it by itself; needed
  // only where the kernel has no pidfd.
  void reap();

  bool running() const { return !ranks_.empty(); }
  bool idle() const { return generation_ == 0; }
  // SIGKILLs and reaps all, tears down; no events. For the end of the daemon.
  void shut_down();

 private:
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
  // `failed` is set to the rank it concerns.
  Status start_generation(const pb::Assignment& assignment, int* failed);
  Status start_rank(const pb::Assignment& assignment,
                    const Placement::Local& local, const Placement& placement,
                    const Scratch::Generation& folders,
                    const std::string& log_folder,
                    const std::vector<std::string>& pmix_env);
  void on_pmix();
  // What its flight record shall say; `ended` is "" when it ended in order.
  FlightAbout on_exit(Rank& rank, int wait_status);
  void keep_flight(const std::string& folder, const FlightAbout& about,
                   const board::Board& board, int64_t died_ns);
  void kill_all();
  void forget_generation();
  RankSample sample(Rank& rank, bool alive);

  LauncherOptions options_;
  Scratch* scratch_;
  wire::Loop* loop_;
  Sink sink_;
  std::shared_ptr<Logger> log_;
  std::unique_ptr<PmixServer> pmix_;
  bool cma_ = true;
  std::vector<std::string> base_env_;

  // The generation at hand; 0: none.
  int64_t generation_ = 0;
  pb::Mesh mesh_;
  std::string run_dir_;
  std::string host_;           // of this worker, as the assignment has it
  bool killed_ = false;        // its ranks were
  uint64_t state_job_ = 0;     // as given to spawn(); 0: it keeps no states
  std::string space_;          // its PMIx namespace; "" when not registered
  std::map<int, Rank> ranks_;  // not reaped yet
  uint32_t request_bits_ = 0;
  int64_t checkpoint_request_ = 0;
};

}  // namespace remesh::agent
