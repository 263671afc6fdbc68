// Replication: keeps every state on more than one worker
// (memory::place_replicas), overlapped with compute. This is one rank's part.
//
// After a restore and after each step that is due (elastic.replicate_every),
// the committed state is copied to the ranks that keep its replicas. A keeper
// on the same host copies from the owner's segment (exchange::MappedReplica);
// others receive the state by MPI (exchange::Replicator). If not every step is
// due, a rank also keeps its own state of the last due step, so that there is a
// step that all ranks have.
//
// Call start() after the commit of a step, poll() often, and finish() before
// the agreement of the next step. done_step() is the newest step whose replicas
// here are complete. A step with complete replicas on all ranks survives the
// loss of a worker.
//
// Ownership: owns the segments that it keeps and its comm; borrows the table
// and the home. Threads: the MPI thread; prepare() may run while MPI starts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "checkpoint/exchange/mapped.h"
#include "checkpoint/exchange/replica.h"
#include "checkpoint/memory/replica_placement.h"
#include "worker/train/state_home.h"

namespace remesh::train {

class Replication {
 public:
  // Allocates the segments that this rank needs, if there is room beside the
  // source of the state; otherwise connect() does. Returns null if no rank of
  // this mesh keeps replicas. Exhausted if shared memory does not suffice.
  // REQUIRES: `home` is reserved.
  static Result<std::unique_ptr<Replication>> prepare(
      const geometry::ParamTable& table, const pb::RankSpec& spec, int rank,
      StateHome& home);

  // Collective, after every rank has committed its initial state: from now on
  // the old contents of the kept segments may be overwritten. Exhausted if
  // shared memory does not suffice.
  Status connect(comm::Comm& world);

  // Whether the state of a step must be replicated.
  bool due(int64_t step) const { return step % every_ == 0; }
  // Whether steps count as finished without a replica.
  bool lags() const { return every_ > 1; }
  // Starts to replicate the newest state, on all ranks alike. REQUIRES: done().
  void start();
  // Does a little work; returns done().
  bool poll();
  bool done() const { return !under_way_; }
  int64_t done_step() const { return done_step_; }
  // Polls until done, and calls `tick` after progress. Corrupt, naming the
  // rank, once after each start(), if a replica is incomplete.
  Status finish(const std::function<void()>& tick);
  // The same for the newest state, on all ranks alike.
  Status finish_newest(const std::function<void()>& tick);
  // Why the replicas of three states in a row are incomplete. Bad memory and a
  // bad network card do not get better, and no step is finished until this rank
  // ends.
  Status lasting_failure() const;

  // Bytes of the segments kept here, without the rank's own.
  uint64_t bytes() const;
  // For the log: the number of replicas kept by this rank, and how many of them
  // are copied from the owner's memory.
  int64_t num_kept() const { return static_cast<int64_t>(kept_.size()); }
  int64_t num_mapped() const { return static_cast<int64_t>(mapped_.size()); }

 private:
  struct Kept {
    int rank = 0;
    int64_t elements = 0;
    std::unique_ptr<memory::StateSegment> segment;
  };
  Replication(const geometry::ParamTable& table, int rank, StateHome& home)
      : table_(table), rank_(rank), home_(home) {}
  Status take_segments(bool beside_source);
  void drop_old(memory::StateSegment& segment) const;
  std::vector<bool> map_owners(comm::Comm& world);
  uint64_t moved() const;
  Status status() const;

  const geometry::ParamTable& table_;
  const int rank_;
  StateHome& home_;
  bool taken_ = false;  // the segments
  int64_t every_ = 1;
  std::vector<memory::RankHost> places_;
  memory::ReplicaPlacement placement_;
  std::vector<Kept> kept_;
  std::unique_ptr<memory::StateSegment>
      own_copy_;  // when not every step is due
  std::unique_ptr<comm::Comm> comm_;
  std::unique_ptr<exchange::Replicator> messages_;
  std::vector<std::unique_ptr<exchange::MappedReplica>> mapped_;
  std::unique_ptr<exchange::LocalReplica> local_;
  bool under_way_ = false;
  bool told_ = false;  // by finish(), the status of step_
  int64_t step_ = -1, done_step_ = -1;
  int failures_ = 0;  // in a row
};

}  // namespace remesh::train
