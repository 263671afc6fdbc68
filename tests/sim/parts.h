// The simulated processes. Private to the source files of both drivers.
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

// Time for latency, ticks and reconnection, in addition to dead_after_ms.
constexpr int64_t kTroubleSlackMs = 1000;
// For this long after a worker's newest incarnation an older one is not
// accepted.
constexpr int64_t kEarlierLifeMs = 10'000;
constexpr int64_t kSettledMs = 4000;  // without faults
constexpr const char* kReadError = "Input/output error";

inline double as_loss(uint64_t state) {
  return static_cast<double>(state >> 11) * 0x1p-53;
}

inline std::string fence_blob(const std::string& worker, int64_t generation,
                              int64_t index) {
  return fmt::format("{}:{}:{};", worker, generation, index);
}

struct Cluster::Rank {
  int rank = 0;
  std::string worker;
  int64_t generation = 0;
  bool alive = true;
  bool stopped = false;     // SIGSTOP
  bool stuck = false;       // hangs in the next collective
  bool finalizing = false;  // in MPI_Finalize, which needs fence 2
  uint64_t progress = 1;
  int64_t step = 0;
  int64_t committed = -1;
  int64_t checkpoint = -1;
  int64_t declined_stops = 0;
  uint32_t request = 0;
  uint32_t declined = 0;
  int64_t save_request = 0;
  int exit_code = 0;
  int signal = 0;
  double exit_time = 0;          // 0: when it is reaped
  std::string error;             // why it ended
  std::string checkpoint_error;  // of its newest save
  std::vector<pb::StepMetrics> ring;
};

struct Cluster::Worker {
  std::string name;
  std::string host;
  StateMemory memory;           // the job's states, which outlive the daemon
  int64_t memory_lost_ms = -1;  // when it was last lost with its host
  std::optional<bool>
      told_to_leave;  // true: although others could take over its states
  uint64_t incarnation = 0;
  int64_t started_ms = 0;
  int slots = 1;
  std::string build = "1";
  std::unique_ptr<agent::Agent> agent;  // null: not running
  int64_t frozen_until = 0;
  int64_t trouble_until = 0;  // frozen, cut off or dead at some time until then
  std::vector<agent::Event> inbox_while_frozen;
  bool held = false;  // its messages are delayed until a script says so
  std::vector<std::function<void()>> undelivered;
  std::map<int, Rank> ranks;  // of the generation spawned last
  int64_t ranks_generation = 0;
  std::optional<uint64_t> room;  // free shared memory, if it says so
  int64_t failing_spawns = 0;    // the next ones fail, with this error
  std::string spawn_error = "no such file";
  std::set<int64_t> spawned;    // in this incarnation
  std::set<int64_t> torn_down;  // in this incarnation
  uint64_t epoch_seen = 0;      // in this incarnation
  bool terminated = false;
  bool left = false;
  int64_t kills_wait_until = 0;  // until then its ranks cannot be killed
  int64_t clock_ms = 0;          // offset of its host's clock
  int64_t uptime_ms = 0;         // offset of its host's monotonic clock
};

struct Cluster::World {
  pb::Assignment assignment;
  int64_t began_ms = 0;  // when the first worker spawned
  bool connected = false;
  // The coordinator declared one of its workers dead.
  bool presumed_dead = false;
  int64_t step = 0;  // finished
  int64_t saved = -1;
  int64_t save_seen = 0;
  bool stalled = false;              // some rank was stopped or stuck
  bool hangs = false;                // of them, before the ranks connect
  std::set<int> faulted;             // ranks that ended by a fault
  std::map<int, int64_t> committed;  // by rank, including dead ones
  std::vector<pb::StepMetrics> recent;
  // States in memory.
  int64_t planned_ms = 0;
  std::map<int, pb::StateHolding> holdings;  // by rank, without a step
  memory::ReplicaPlacement replicas;
  std::map<int64_t, uint64_t> tags;  // of its states, by step
  int64_t origin = 0;  // generation of the state that it started from
  std::map<int64_t, std::set<int>> own;    // ranks that committed it
  std::map<int, int> replicas_left;        // of the newest step, by rank
  std::map<int64_t, int64_t> complete_ms;  // when all ranks had committed it
  // Daemons that have the metrics of a step.
  std::map<int64_t, std::set<std::string>> reporters;
  std::map<std::string, std::set<int64_t>> fences_done;  // by worker
};

}  // namespace remesh::sim
