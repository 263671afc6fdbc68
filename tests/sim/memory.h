// StateMemory: the state segments of one simulated worker: the two buffers of
// each rank and of each replica, their records, and the invalidation of a
// record when its buffer is written again (checkpoint/memory/segment.h). The
// state itself is a tag, a hash of its history.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "parallel/geometry/param_table.h"
#include "proto/control.pb.h"

namespace remesh::sim {

class StateMemory {
 public:
  struct Record {
    pb::StateHolding holding;
    uint64_t tag = 0;
  };

  // The next state of the segment is being written: invalidates the older of
  // its two records.
  void begin(int64_t generation, int rank, bool replica);
  void commit(const pb::StateHolding& holding, uint64_t tag);
  // Removes the segments of older generations, except of that one.
  void forget_before(int64_t generation, int64_t except = 0);
  void clear() { segments_.clear(); }
  bool empty() const { return segments_.empty(); }

  std::vector<pb::StateHolding> inventory() const;
  // nullptr if there is none.
  const Record* find(int64_t generation, int64_t step, int rank) const;

 private:
  // By generation, rank and whether it is a replica; the older record first.
  std::map<std::tuple<int64_t, int, bool>, std::vector<Record>> segments_;
};

// A rank's record, as its worker reports it. `table` is the job's.
pb::StateHolding make_holding(const geometry::ParamTable& table,
                              const pb::Assignment& assignment, int rank,
                              int64_t step, bool replica);

}  // namespace remesh::sim
