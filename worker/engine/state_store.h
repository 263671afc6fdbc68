// StateStore: holds a rank's training state and decides where an update writes
// the next one.
//
//   current()   the newest complete state, unchanged until begin()
//   begin()     returns where to write the next state. Either the same memory
//               (in place: writes take effect at once), or other memory, and
//               then current() stays complete until commit()
//   commit(k)   makes what was written current(), as the state of step k
//
// Updating in place is enough for state in private memory. A rank whose state
// must survive a kill keeps it in shared memory and updates out of place
// (worker/train/state_home.h).
//
// Vectors are in the order of ZeroPlan::state_offset. Threads: one.
#pragma once

#include <cstdint>
#include <memory>

#include "parallel/geometry/sharding.h"
#include "parallel/geometry/state_vectors.h"
#include "proto/base/status.h"
#include "worker/kernels/backend.h"

namespace remesh::engine {

using geometry::ConstStateView;
using geometry::StateView;

class StateStore {
 public:
  virtual ~StateStore() = default;
  // Allocates vectors of `elements`, zeroed or holding a state: this rank's
  // part of a state sharded like that. Called once, first. Fails with
  // kExhausted when memory is short.
  virtual Status reserve(const geometry::Sharding& sharding,
                         int64_t elements) = 0;
  virtual ConstStateView current() const = 0;
  virtual StateView begin() = 0;
  // REQUIRES: begin() before.
  virtual void commit(int64_t step) = 0;
  // Number of copies of the three vectors in memory.
  virtual int copies() const = 0;
};

// In place, in the backend's memory, which must outlive it.
std::unique_ptr<StateStore> own_memory(kernels::Backend& backend);

}  // namespace remesh::engine
