// Replication: this rank's part in keeping every state on more than one worker
// (memory::place_replicas), beside the computing.
//
// After each step that is due (elastic.replicate_every), and after a restore,
// the committed state goes to the ranks that keep it, and this rank receives
// those that it keeps. A keeper on the same host copies straight from the
// owner's segment (exchange::MappedReplica); else the state travels by MPI
// (exchange::Replicator). Where not every step is due, a rank keeps its own
// state of the last due step as well, so that there is one step that all have.
//
// Life of a step:  start() after its commit; poll() as often as there is time;
// finish() before the agreement of the step after it. done_step() is the newest
// step whose replicas here are whole; on all ranks: that step survives.
//
// Ownership: owns the segments it keeps and its comm; borrows the home.
// Threads: the one of MPI; prepare() may run beside MPI's start.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/exchange/mapped.h"
#include "checkpoint/exchange/replica.h"
#include "checkpoint/memory/buddies.h"
#include "worker/train/state_home.h"

namespace remesh::train {

class Replication {
 public:
  // Takes the segments that this rank needs. `home`: reserved. Null when no
  // rank of this mesh has a replica to make. Exhausted when shared memory is
  // short.
  static Result<std::unique_ptr<Replication>> prepare(
      const geometry::ParamTable& table, const pb::RankSpec& spec, int rank,
      StateHome& home);

  // Collective, once every rank has committed the state it begins with: from
  // now on what the kept segments held before may be overwritten.
  Status connect(comm::Comm& world);

  // Whether the state of a step is replicated without being asked.
  bool due(int64_t step) const { return step % every_ == 0; }
  // Whether a step counts as finished before it has a replica.
  bool lags() const { return every_ > 1; }
  // Begins with the newest state, on every rank alike. REQUIRES: done().
  void start();
  // A little work; true when nothing is under way.
  bool poll();
  bool done() const { return !under_way_; }
  int64_t done_step() const { return done_step_; }
  // Polls until all is done, calling `tick` when something moved. Corrupt,
  // naming the rank, when a replica did not come whole.
  Status finish(const std::function<void()>& tick);

  // Bytes of the segments held here beside the rank's own.
  uint64_t bytes() const;
  // For the log: replicas that this rank keeps, and how many of them are copied
  // from the owner's memory.
  int64_t num_kept() const { return static_cast<int64_t>(kept_.size()); }
  int64_t num_mapped() const { return static_cast<int64_t>(mapped_.size()); }

 private:
  struct Kept {
    int rank = 0;
    int64_t elements = 0;
    std::unique_ptr<memory::StateSegment> segment;
  };
  Replication(int rank, StateHome& home) : rank_(rank), home_(home) {}
  Status take_segments(const geometry::ParamTable& table, bool lags);
  void drop_old(memory::StateSegment& segment) const;
  std::vector<bool> map_owners(comm::Comm& world);
  uint64_t moved() const;
  Status status() const;

  const int rank_;
  StateHome& home_;
  int64_t every_ = 1;
  std::vector<memory::RankPlace> places_;
  memory::Placement placement_;
  std::vector<Kept> kept_;
  std::unique_ptr<memory::StateSegment>
      own_copy_;  // when not every step is due
  std::unique_ptr<comm::Comm> comm_;
  std::unique_ptr<exchange::Replicator> messages_;
  std::vector<std::unique_ptr<exchange::MappedReplica>> mapped_;
  std::unique_ptr<exchange::LocalReplica> local_;
  bool under_way_ = false;
  int64_t step_ = -1, done_step_ = -1;
};

}  // namespace remesh::train
