// The simulated processes' insides, for cluster.cc and invariants.cc alone.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/memory/replica_placement.h"
#include "tests/sim/cluster.h"
#include "tests/sim/memory.h"

namespace remesh::sim {

// Latency, ticks and reconnecting, on top of dead_after_ms.
constexpr int64_t kTroubleSlackMs = 1000;
// Within this time of a worker's newest life an earlier one is not taken for
// it.
constexpr int64_t kEarlierLifeMs = 10'000;
constexpr int64_t kSettledMs = 4000;  // without faults

inline double as_loss(uint64_t state) {
  return static_cast<double>(state >> 11) * 0x1p-53;
}

inline std::string fence_blob(const std::string& worker, int64_t generation,
                              int64_t index) {
  return fmt::format("{}:{}:{};", worker, generation, index);
}

struct Cluster::Rank {
  int rank = 0;
  int64_t generation = 0;
  bool alive = true;
  bool stopped = false;     // SIGSTOP
  bool stuck = false;       // hangs in the next collective
  bool finalizing = false;  // in MPI_Finalize, which needs fence 2
  uint64_t progress = 1;
  int64_t step = 0;
  int64_t committed = -1;
  int64_t checkpoint = -1;
  int64_t refused = 0;
  uint32_t request = 0;
  uint32_t declined = 0;
  int64_t save_request = 0;
  int exit_code = 0;
  int signal = 0;
  std::vector<pb::StepMetrics> ring;
};

struct Cluster::Worker {
  std::string name;
  std::string host;
  StateMemory memory;           // of the job's states: outlives the daemon
  int64_t memory_lost_ms = -1;  // with its host, last time
  std::optional<bool>
      told_to_leave;  // true: though others could take its states
  uint64_t incarnation = 0;
  int slots = 1;
  std::string build = "1";
  std::unique_ptr<agent::Agent> agent;  // null: not running
  int64_t frozen_until = 0;
  int64_t trouble_until = 0;  // frozen, cut off or dead at some time till then
  std::vector<agent::Event> inbox_while_frozen;
  std::map<int, Rank> ranks;  // of the generation spawned last
  int64_t ranks_generation = 0;
  std::set<int64_t> spawned;    // in this life
  std::set<int64_t> torn_down;  // in this life
  uint64_t epoch_seen = 0;      // in this life
  bool terminated = false;
  bool left = false;
  int64_t kills_wait_until = 0;  // its ranks and folders cannot be removed
  int64_t clock_ms = 0;          // of its host, in addition to the time
  int64_t uptime_ms = 0;         // the same of its monotonic clock
};

struct Cluster::World {
  pb::Assignment assignment;
  int64_t began_ms = 0;  // when the first worker spawned
  bool connected = false;
  bool given_up = false;  // the coordinator took one of its workers for dead
  int64_t step = 0;       // finished
  int64_t saved = -1;
  int64_t save_seen = 0;
  bool stood = false;                // some rank was stopped or stuck
  std::set<int> faulted;             // ranks that ended by themselves
  std::map<int, int64_t> committed;  // by rank, also of dead ones
  std::vector<pb::StepMetrics> recent;
  // States in memory.
  int64_t planned_ms = 0;
  std::map<int, pb::StateHolding> holdings;  // by rank, without a step
  memory::Placement replicas;
  std::map<int64_t, uint64_t> tags;  // of its states, by step
  int64_t origin = 0;  // generation of the state that it began with
  std::map<int64_t, std::set<int>> own;  // ranks that committed it
  std::map<int, int> replicas_left;      // of the newest step, by rank
  std::map<int64_t, int64_t> whole_ms;   // committed by all, when
  std::set<std::string> reporters_died;  // daemons that had steps' numbers
  std::map<std::string, std::set<int64_t>> fences_done;  // by worker
};

}  // namespace remesh::sim
