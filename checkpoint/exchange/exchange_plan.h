// Resharding between meshes in memory, as data: which part of which old rank's
// state fills which part of a new rank's vectors, and which process sends it.
// Pure: every process computes the same plan from the same inputs and takes its
// own part, so none asks another.
//
// The old states are in shared memory (checkpoint/memory). A process reads
// those of its own host itself; a process on another host sends it the rest. If
// a state is exactly what a new rank of the same worker needs, the rank reuses
// it in place, without copying.
//
// Exactly one copy fills every element of a new rank's vectors (geometry/
// reshard.h), unless the rank reuses a state.
//
// Cost: ranks x pieces x replica groups of the old mesh.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/geometry/reshard.h"
#include "parallel/geometry/sharding.h"

namespace remesh::exchange {

// A state of the old mesh.
struct OldState {
  int rank = 0;    // of the old mesh
  int host = 0;    // whose processes can map it
  int worker = 0;  // that owns it
  friend bool operator==(const OldState&, const OldState&) = default;
};

// Process i is rank i of the exchange's Comm. The first world() of them are the
// ranks of the new mesh; further ones, of which the trainer has none, only
// send.
struct Process {
  int host = 0;
  int worker = 0;
};

// Its source is an index into the sources, its offsets are elements of the
// state vectors.
using geometry::Copy;

// The copies that one process sends to another, in this order.
struct Stream {
  int peer = 0;
  std::vector<Copy> copies;
  int64_t elements = 0;
};

struct Plan {
  int reuse = -1;           // the source that this rank reuses, or -1
  std::vector<int> reuses;  // the same for every new rank
  std::vector<Copy> local;  // from sources of this host
  // In the order of the exchange: by (to - from) modulo the number of
  // processes, which prevents a deadlock of bounded buffers.
  std::vector<Stream> receive, send;
  int64_t elements = 0;  // of this rank's vectors
  uint64_t digest = 0;   // of all inputs: the same on every process
};

// The part of process `me`. Fails like make_rank_shard(); InvalidArgument when
// a source belongs to no rank of `from` or there are fewer processes than
// ranks; Unavailable, naming a parameter, when the reachable sources do not
// hold all of it. A source is reachable if its host has a process.
Result<Plan> plan_exchange(const geometry::ParamTable& table,
                           const geometry::Sharding& from,
                           std::span<const OldState> sources,
                           const geometry::Sharding& to,
                           std::span<const Process> processes, int me);

}  // namespace remesh::exchange
