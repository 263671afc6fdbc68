// MemorySource: restores a state from the shared memory of this generation's
// workers. A rank reuses a state in place, reads others, or receives them
// (checkpoint/exchange).
//
//   make()   needs no peer: plans the exchange, then maps the states that this
//            rank reads and verifies those with a content hash
//   run()    performs the exchange
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
#include "checkpoint/memory/replica_placement.h"
#include "checkpoint/memory/segment.h"
#include "parallel/comm/comm.h"
#include "proto/control.pb.h"
#include "worker/train/segments.h"

namespace remesh::train {

class MemorySource {
 public:
  // `to` is the sharding of this generation. Fails if states of the source are
  // missing, damaged or incomplete. REQUIRES: the source of the assignment has
  // kind MEMORY.
  static Result<std::unique_ptr<MemorySource>> make(
      const geometry::ParamTable& table, const pb::Assignment& assignment,
      const geometry::Sharding& to, int rank, const Segments& segments);

  // The segment whose state this rank reuses in place, or "".
  const std::string& reused() const { return reused_; }
  // The segments of the source, and those of them that some rank reuses.
  const std::set<std::string>& paths() const { return paths_; }
  const std::set<std::string>& reused_paths() const { return reused_paths_; }
  int64_t step() const { return step_; }
  int64_t generation() const { return generation_; }
  int64_t tokens() const { return tokens_; }
  // The state of rank `rank` of the old mesh in a segment.
  Result<memory::StateSegment::Committed> find(
      const memory::StateSegment& segment, int rank) const;
  // The rank of the old mesh whose state is reused.
  int reused_rank() const { return reused_rank_; }

  // Collective: fills `target` (unused if this rank reuses a state).
  Status run(comm::Comm& world, const geometry::StateView& target,
             const std::function<void()>& tick);
  // Unmaps the source. Call it after run().
  void release() { opened_.clear(); }

 private:
  MemorySource() = default;
  void read_facts(const pb::Assignment& assignment);
  Status open_sources(const geometry::ParamTable& table, const Segments& all);

  geometry::Sharding from_;
  uint64_t model_ = 0;
  int64_t step_ = 0, generation_ = 0, tokens_ = 0;
  std::vector<exchange::Source> sources_;
  std::vector<std::string> files_;  // by source
  std::vector<exchange::Process> processes_;
  exchange::Plan plan_;
  std::string reused_;
  int reused_rank_ = -1;
  std::set<std::string> paths_, reused_paths_;
  std::vector<std::unique_ptr<memory::StateSegment>> opened_;
  std::vector<geometry::ConstStateView>
      views_;  // by source; empty: not read here
};

}  // namespace remesh::train
