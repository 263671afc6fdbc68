// MemorySource: a state in the shared memory of this generation's workers,
// which its ranks begin with: what this rank takes over as it stands, what it
// reads, and what is sent to it (checkpoint/exchange).
//
//   make()   needs no peer: the plan; the states that this rank reads are
//            mapped, looked for and, those with a content hash, verified
//   run()    the exchange
//
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/exchange/plan.h"
#include "checkpoint/memory/buddies.h"
#include "checkpoint/memory/segment.h"
#include "parallel/comm/comm.h"
#include "proto/control.pb.h"
#include "worker/train/segments.h"

namespace remesh::train {

// Worker and host of each rank of the mesh; "" where the assignment does not
// say.
std::vector<memory::RankPlace> places_of(const pb::Assignment& assignment,
                                         int world);

class MemorySource {
 public:
  // REQUIRES: the assignment's source is of kind MEMORY. `to`: how this
  // generation cuts the state. Fails when the states named are not there, do
  // not verify, or do not hold all: then the source is bad.
  static Result<std::unique_ptr<MemorySource>> make(
      const geometry::ParamTable& table, const pb::Assignment& assignment,
      const geometry::Sharding& to, int rank, const Segments& segments);

  // The segment that this rank takes over, or "".
  const std::string& adopted() const { return adopted_; }
  // Segments that hold the source; those of them that some rank takes over.
  const std::set<std::string>& paths() const { return paths_; }
  const std::set<std::string>& adopted_paths() const { return adopted_paths_; }
  int64_t step() const { return step_; }
  int64_t generation() const { return generation_; }
  int64_t tokens() const { return tokens_; }
  // The record of that rank of the old mesh in a segment.
  Result<memory::StateSegment::Committed> find(
      const memory::StateSegment& segment, int rank) const;
  // Of the rank whose state is taken over.
  int adopted_rank() const { return adopted_rank_; }

  // Collective: fills `target` (any when this rank adopts).
  Status run(comm::Comm& world, const memory::MutableState& target,
             const std::function<void()>& tick);
  // Forgets the mappings. After run().
  void release() { opened_.clear(); }

 private:
  MemorySource() = default;
  void read_facts(const pb::Assignment& assignment, int world);
  Status open_sources(const geometry::ParamTable& table, const Segments& all);

  geometry::Sharding from_;
  uint64_t model_ = 0;
  int64_t step_ = 0, generation_ = 0, tokens_ = 0;
  std::vector<exchange::Source> sources_;
  std::vector<std::string> files_;  // by source
  std::vector<exchange::Process> processes_;
  exchange::Plan plan_;
  std::string adopted_;
  int adopted_rank_ = -1;
  std::set<std::string> paths_, adopted_paths_;
  std::vector<std::unique_ptr<memory::StateSegment>> opened_;
  std::vector<memory::ConstState> views_;  // by source; empty: not read here
};

}  // namespace remesh::train
