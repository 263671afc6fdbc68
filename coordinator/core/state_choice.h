// Inventory: which state a new generation begins with, given what every live
// worker holds in its memory and which checkpoints verify. Pure.
//
// The newest step that is whole wins; in memory before on disk at the same
// step. A step is whole when the states of one generation at that step hold,
// together, every element of every parameter. States of different generations
// are never put together: the same step, computed again on another mesh, has
// other bits.
//
// A worker that comes back may hold steps of a branch that the job has left: it
// went on from an older step without them. Such states are set aside, however
// new (FirstStep).
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/core/step_ledger.h"
#include "parallel/geometry/sharding.h"

namespace remesh::core {

// The state of one rank in the memory of a live worker: what a segment's record
// says (checkpoint/memory/state_info.h), and where it is.
struct Holding {
  std::string worker;
  std::string host;
  std::string segment;  // path on that host
  int64_t step = 0;
  int64_t generation = 0;
  int rank = 0;  // of that generation's mesh
  geometry::Sharding sharding;
  uint64_t model = 0;  // geometry::model_id
  int64_t elements = 0;
  int64_t tokens = 0, sequences = 0;
  bool replica = false;
};

struct SavedState {
  int64_t step = 0;
  int64_t generation = 0;  // 0: not known
  std::string path;
};

struct Inventory {
  std::vector<Holding> holdings;        // any order
  std::vector<SavedState> checkpoints;  // those that verify, any order
  std::vector<FirstStep> first_steps;   // any order
  // Where the new generation will have processes; a state elsewhere cannot be
  // read. Empty: everywhere.
  std::set<std::string> hosts;
  // (generation, step) of states in memory that failed to load.
  std::set<std::pair<int64_t, int64_t>> refused;
  int64_t max_step = INT64_MAX;  // of the job
  // By generation, the last step whose metrics are known: no state beyond it.
  // Of those not named, any.
  std::map<int64_t, int64_t> known_steps;
  int64_t last_finished = 0;  // step in the record of steps
};

struct StateChoice {
  enum class Kind { kInit, kCheckpoint, kMemory };
  Kind kind = Kind::kInit;
  int64_t step = 0;
  // Of memory: who wrote it, how it is cut, and the holdings to read, by rank;
  // of each rank at most one a host, its own before replicas, then by worker.
  int64_t generation = 0;
  geometry::Sharding sharding;
  std::vector<size_t> sources;  // indices into Inventory::holdings
  int64_t tokens = 0, sequences = 0;
  std::string path;  // of the checkpoint
  // Why this one, and why nothing newer, in words for events.jsonl.
  std::string why;
};

// table: of the job's model; may be null if there are no holdings.
StateChoice choose_state(const geometry::ParamTable* table,
                         const Inventory& inventory);

}  // namespace remesh::core
