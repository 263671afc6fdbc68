// StateStore: where a rank's training state lives, and how an update makes the
// next state of it.
//
//   current()   the newest whole state; stays as it is until begin()
//   begin()     where the next one is written. Either the same memory (in
//               place: what is written is the state at once), or other memory:
//               then current() stays whole until commit()
//   commit(k)   what was written is the state of step k, and current()
//
// In place is all that a rank needs which keeps its state to itself; a rank
// that must lose nothing when it is killed keeps it in shared memory and
// updates out of place (worker/train/state_home.h).
//
// Vectors stand in the order of ZeroPlan::state_offset. Threads: one.
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
  // Makes room, zeroed or holding a state, for vectors of `elements`: what this
  // rank holds of a state cut like that. Once, before all else. Exhausted when
  // memory is short.
  virtual Status reserve(const geometry::Sharding& sharding,
                         int64_t elements) = 0;
  virtual ConstStateView current() const = 0;
  virtual StateView begin() = 0;
  // REQUIRES: begin() before.
  virtual void commit(int64_t step) = 0;
  // How often the three vectors are held.
  virtual int copies() const = 0;
};

// In place, in the backend's memory, which must outlive it.
std::unique_ptr<StateStore> own_memory(kernels::Backend& backend);

}  // namespace remesh::engine
