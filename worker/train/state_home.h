// StateHome: a rank's training state in a segment of shared memory that
// outlives the rank: what it committed last is whole, whatever kills it.
//
// An update reads one buffer of the segment and writes the other; commit() says
// of what step, generation and rank it is (checkpoint/memory/segment.h).
//
// Where the segment comes from, in reserve(): the one that this rank takes over
// from the generation before, an old one that nobody needs, or a new one.
//
// Ownership: owns the segment's mapping and the source; borrows the table.
// Threads: one at a time; reserve() may run beside MPI's start.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/memory/segment.h"
#include "parallel/comm/comm.h"
#include "proto/base/exit_code.h"
#include "proto/control.pb.h"
#include "worker/board/board.h"
#include "worker/engine/state_store.h"
#include "worker/train/memory_source.h"
#include "worker/train/segments.h"

namespace remesh::train {

class StateHome final : public engine::StateStore {
 public:
  // `spec` names folder, job and source, and must outlive it, like the table.
  // `rank`: of the new mesh.
  StateHome(const geometry::ParamTable& table, const pb::RankSpec& spec,
            int rank);

  // Fails with exit_code() when a source is not what it should be, or shared
  // memory is short.
  Status reserve(const geometry::Sharding& sharding, int64_t elements) override;
  engine::ConstStateView current() const override;
  engine::StateView begin() override;
  void commit(int64_t step) override;
  int copies() const override { return 2; }
  // What the process exits with after reserve() or fail_allocation().
  std::optional<ExitCode> exit_code() const { return exit_code_; }

  // Sets exit_code() for a failed segment allocation; returns `status`.
  Status fail_allocation(Status status);

  // Collective over the mesh's world: fills the state from the source in
  // memory. REQUIRES: reserved, and the source is of that kind.
  Status restore(comm::Comm& world, const std::function<void()>& tick);

  // Data position of later commits: the state of `step` had seen so many
  // tokens.
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
  // Null when the source is no memory.
  const MemorySource* source() const { return source_.get(); }

 private:
  Status adopt();
  Status fail(ExitCode code, Status status);
  memory::StateInfo info(int64_t step) const;

  const geometry::ParamTable& table_;
  const pb::RankSpec& spec_;
  const int rank_;
  const uint64_t model_;
  const Segments segments_;
  geometry::Sharding sharding_;
  int64_t elements_ = 0;
  std::unique_ptr<MemorySource> source_;
  std::unique_ptr<memory::StateSegment> segment_;
  std::optional<memory::StateSegment::Committed> committed_;
  int buffer_ = 0;  // of the newest state
  int begun_ = -1;
  int64_t first_step_ = 0, first_tokens_ = 0;
  std::optional<ExitCode> exit_code_;
};

}  // namespace remesh::train
