// StateHome: stores a rank's training state in a segment of shared memory that
// outlives the rank. The last committed state is complete whenever the rank
// dies.
//
// An update reads one buffer of the segment and writes the other; commit()
// records its step, generation and rank (checkpoint/memory/segment.h).
//
// reserve() reuses the segment whose state this rank restores in place, or an
// unused one, or creates a new one.
//
// Ownership: owns the mapping of the segment and the source; borrows the table.
// Threads: one at a time; reserve() may run while MPI starts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/exchange/exchange_plan.h"
#include "checkpoint/memory/segment.h"
#include "parallel/comm/comm.h"
#include "proto/base/exit_code.h"
#include "proto/control.pb.h"
#include "worker/board/board.h"
#include "worker/engine/state_store.h"
#include "worker/train/segments.h"

namespace remesh::train {

// Restores a state from the shared memory of this generation's workers. A rank
// reuses a state in place, reads others, or receives them
// (checkpoint/exchange).
//
//   make()   needs no peer: plans the exchange, then maps the states that this
//            rank reads and verifies those with a content hash
//   run()    performs the exchange
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
  const Segments::SourceStates& states() const { return states_; }
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
  void read_assignment(const pb::Assignment& assignment);
  Status open_sources(const geometry::ParamTable& table, const Segments& all);

  geometry::Sharding from_;
  uint64_t model_ = 0;
  Segments::SourceStates states_;
  int64_t tokens_ = 0;
  std::vector<exchange::OldState> sources_;
  std::vector<std::string> files_;  // by source
  std::vector<exchange::Process> processes_;
  exchange::Plan plan_;
  std::string reused_;
  int reused_rank_ = -1;
  std::vector<std::unique_ptr<memory::StateSegment>> opened_;
  std::vector<geometry::ConstStateView> views_;  // by source; empty: not read
};

class StateHome final : public engine::StateStore {
 public:
  // `spec` has the folder, job and source. It and the table must outlive this.
  // `rank` is the rank in the new mesh. Calls `tick`, from any thread, while it
  // allocates.
  StateHome(const geometry::ParamTable& table, const pb::RankSpec& spec,
            int rank, const std::function<void()>& tick = {});

  // On failure, such as a bad source or insufficient shared memory, exit_code()
  // is set.
  Status reserve(const geometry::Sharding& sharding, int64_t elements) override;
  engine::ConstStateView current() const override {
    return segment_->read(buffer_, elements_);
  }
  engine::StateView begin() override;
  void commit(int64_t step) override;
  int copies() const override { return 2; }
  // What the process exits with after reserve() or fail_allocation().
  std::optional<ExitCode> exit_code() const { return exit_code_; }

  // Sets exit_code() for a failed segment allocation; returns `status`.
  Status fail_allocation(Status status);

  // Allocates what reserve() had no room for beside the source. REQUIRES: all
  // ranks have restored their state. Exhausted, with exit_code() set.
  Status complete();

  // Collective over the mesh's world: fills the state from the source in
  // memory. REQUIRES: reserved, and the source is of that kind.
  Status restore(comm::Comm& world, const std::function<void()>& tick);

  // Sets the data position for later commits: the state of `step` has consumed
  // that many tokens.
  void set_position(int64_t step, int64_t tokens) {
    first_step_ = step;
    first_tokens_ = tokens;
  }
  // The newest state. REQUIRES: there is one.
  const memory::StateSegment::Committed& committed() const {
    return *committed_;
  }
  memory::StateSegment& segment() { return *segment_; }
  const geometry::Sharding& sharding() const { return sharding_; }
  const Segments& segments() const { return segments_; }
  // Whether the states of all ranks of this host, with replicas, had room when
  // this rank reserved its own.
  bool roomy() const { return roomy_; }
  // Null if the source is not in memory.
  const MemorySource* source() const { return source_.get(); }

 private:
  Status reuse();
  bool has_room_for_all() const;
  Status fail(ExitCode code, Status status) {
    exit_code_ = code;
    return status;
  }
  memory::StateInfo info(int64_t step) const;

  const geometry::ParamTable& table_;
  const pb::RankSpec& spec_;
  const int rank_;
  const uint64_t model_;
  const std::function<void()> tick_;
  const Segments segments_;
  geometry::Sharding sharding_;
  int64_t elements_ = 0;
  std::unique_ptr<MemorySource> source_;
  std::unique_ptr<memory::StateSegment> segment_;
  std::optional<memory::StateSegment::Committed> committed_;
  bool roomy_ = true;
  bool whole_ = true;  // all of segment_ is allocated
  int buffer_ = 0;     // has the newest state
  int begun_ = -1;
  int64_t first_step_ = 0, first_tokens_ = 0;
  std::optional<ExitCode> exit_code_;
};

}  // namespace remesh::train
