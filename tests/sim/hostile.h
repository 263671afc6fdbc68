// Messages that a faulty or hostile peer may send, none of which may have an
// effect: values far out of range, mutated copies of real messages, messages of
// dead processes, and well-formed reports of numbers and checkpoints that do
// not exist.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "coordinator/core/coordinator.h"
#include "worker/agent/core/agent.h"

namespace remesh::sim {

// The client of the commands.
inline constexpr uint64_t kHostileClient = ~uint64_t{0};

// What the sender has overheard on the network.
struct Overheard {
  struct Life {
    std::string worker;
    uint64_t incarnation = 0;  // that the coordinator considers alive
  };
  std::vector<Life> alive;
  pb::Report report;        // a real one
  pb::Directive directive;  // a real one
  int64_t generation = 0;
  uint64_t epoch = 0;
};

core::Input hostile_input(std::mt19937_64& rng, const Overheard& overheard);
// A message to that worker.
agent::Event hostile_event(std::mt19937_64& rng, const std::string& worker,
                           uint64_t incarnation, const Overheard& overheard);
// Whether the action may answer such a message. How often these are reported is
// limited, so a real one that is refused may get no report.
bool answers_hostile(const core::Action& action);

}  // namespace remesh::sim
