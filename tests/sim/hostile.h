// Messages that a faulty or hostile peer may send, none of which may change
// anything: values out of any sensible range, mutated copies of real messages,
// the words of processes that are dead, and well-formed reports of numbers and
// checkpoints that nobody can know of.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "coordinator/core/coordinator.h"
#include "worker/agent/core/agent.h"

namespace remesh::sim {

// Under which commands are sent.
inline constexpr uint64_t kHostileClient = ~uint64_t{0};

// What the sender has seen on the network.
struct Overheard {
  struct Life {
    std::string worker;
    uint64_t incarnation = 0;  // that the coordinator takes for alive
  };
  std::vector<Life> alive;
  pb::Report report;        // some real one
  pb::Directive directive;  // some real one
  int64_t generation = 0;
  uint64_t epoch = 0;
};

core::Input hostile_input(std::mt19937_64& rng, const Overheard& overheard);
// To that worker.
agent::Event hostile_event(std::mt19937_64& rng, const std::string& worker,
                           uint64_t incarnation, const Overheard& overheard);

}  // namespace remesh::sim
