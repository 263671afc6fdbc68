// StateMemory: the state segments of one simulated worker, as the ranks of a
// job leave them: each rank's own two buffers and those it keeps for others,
// records that stand beside each other, and what is taken back when a buffer
// is written again (checkpoint/memory/segment.h). The state itself is a tag: a
// hash of all that led to it.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "parallel/geometry/param_table.h"
#include "parallel/geometry/sharding.h"
#include "proto/control.pb.h"

namespace remesh::sim {

class StateMemory {
 public:
  struct Record {
    pb::StateHolding holding;
    uint64_t tag = 0;
  };

  // The next state of that segment is being written: the older of its two is
  // not there any more.
  void begin(int64_t generation, int rank, bool replica);
  void commit(const pb::StateHolding& holding, uint64_t tag);
  // The segments of older generations are removed.
  void forget_before(int64_t generation);
  void clear() { segments_.clear(); }
  bool empty() const { return segments_.empty(); }

  std::vector<pb::StateHolding> inventory() const;
  // nullptr: it does not stand there.
  const Record* find(int64_t generation, int64_t step, int rank) const;

 private:
  // By generation, rank and whether it is a replica; older record first.
  std::map<std::tuple<int64_t, int, bool>, std::vector<Record>> segments_;
};

// How the ranks of an assignment cut the state, as the trainer does.
geometry::Sharding trainer_sharding(const pb::Assignment& assignment);

// What a rank's record says. `table` is the job's.
pb::StateHolding make_holding(const geometry::ParamTable& table,
                              const pb::Assignment& assignment, int rank,
                              int64_t step, bool replica);

}  // namespace remesh::sim
