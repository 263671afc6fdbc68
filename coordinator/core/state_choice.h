// choose_state(): which state a new generation starts from, given what every
// live worker holds in memory and which checkpoints verify. Pure.
//
// The newest complete step wins, in memory before on disk. A step is complete
// when the states of one generation at that step together hold every element of
// every parameter. States of different generations are never combined: the same
// step computed again on another mesh has different bits.
//
// Of several generations with that step on one branch, the oldest made it, on
// hosts where its ranks ran, and the others restored it and made no step. Its
// states are chosen, so that they are kept: a later one may be complete only
// with a part on a host whose ranks always fail, and has no replicas yet.
//
// A worker that returns may hold steps of an abandoned branch, that is, the job
// continued from an older step without them, and ranks that were cut off may
// have saved them. Such states and checkpoints are not considered, however new.
// abandoned_by() judges that for whoever knows where every generation
// continued. A rank knows that only of its own generation
// (checkpoint/manifest/branch.h), and whoever has nothing but a folder of
// checkpoints not at all (checkpoint/manifest/scan.h).
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/core/api.h"
#include "parallel/geometry/param_table.h"
#include "parallel/geometry/sharding.h"
#include "proto/control.pb.h"

namespace remesh::core {

// The state of one rank in the memory of a live worker.
struct Holding {
  pb::StateHolding info;
  geometry::Sharding sharding;  // that of `info`
};

struct Inventory {
  std::vector<Holding> holdings;            // in any order
  std::vector<CheckpointInfo> checkpoints;  // in any order, without metrics
  std::vector<FirstStep> first_steps;       // in any order
  // Hosts on which the new generation will have processes; states on other
  // hosts cannot be read. Empty: all hosts.
  std::set<std::string> hosts;
  // (generation, step) of states in memory that failed to load.
  std::set<std::pair<int64_t, int64_t>> refused;
  // By generation, the last step whose metrics are known: no newer state is
  // chosen. Generations that are not listed have no such limit.
  std::map<int64_t, int64_t> known_steps;
  int64_t last_finished = 0;  // step in the metrics log
};

// The first generation whose history has another version of this step than the
// one of `generation`, and so abandoned it; 0 if none does.
int64_t abandoned_by(const std::vector<FirstStep>& first_steps,
                     int64_t generation, int64_t step);

struct StateChoice {
  pb::Source::Kind kind = pb::Source::INIT;
  int64_t step = 0;
  int64_t generation = 0;  // that wrote the state
  std::string path;        // CHECKPOINT
  // MEMORY: the holdings to read, in the order of ranks; at most one per rank
  // and host, the rank's own before replicas, then by worker.
  std::vector<size_t> sources;  // indices into Inventory::holdings
  // One line for people: why this state, and why nothing newer.
  std::string why;
};

// table: of the job's model; may be null if there are no holdings.
StateChoice choose_state(const geometry::ParamTable* table,
                         const Inventory& inventory);

// Hosts that together hold every part of the state in memory that was chosen
// from the inventory: those that are left when each host in turn, in that
// order, is left out if the others hold what it has.
std::set<std::string> fewest_hosts(const Inventory& inventory,
                                   const StateChoice& choice,
                                   const std::vector<std::string>& order);

}  // namespace remesh::core
