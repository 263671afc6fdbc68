// Resharding between meshes, as data: which part of which old rank's state
// fills which part of a new rank's vectors, and which process sends it. Pure:
// every process computes the same plan from the same facts and takes its own
// part of it, so nobody asks and nobody waits for an answer.
//
// Old states lie in shared memory (checkpoint/memory). A process reads those of
// its own host itself; those of another host are sent to it by a process there.
// A state that is exactly what a new rank of the same worker needs is taken
// over as it stands (adopted), at no copying at all.
//
// Invariant: every element of a new rank's vectors is filled by exactly one
// copy, or the rank adopts. It holds for any two shardings (the idea of
// PyTorch's distributed checkpoint planner).
//
// Cost: ranks x pieces x replica groups of the old mesh.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/geometry/sharding.h"

namespace remesh::exchange {

// A state of the old mesh.
struct Source {
  int rank = 0;    // of the old mesh: what it holds
  int host = 0;    // whose processes can map it
  int worker = 0;  // that owns it
  friend bool operator==(const Source&, const Source&) = default;
};

// Process i is rank i of the exchange's Comm. The first world() of them are the
// ranks of the new mesh; the others only send (a worker that leaves).
struct Process {
  int host = 0;
  int worker = 0;
};

// A rectangle of one parameter. Offsets in elements of the state vectors.
struct Copy {
  int source = 0;  // index into the sources
  int64_t from_at = 0, from_stride = 0;
  int64_t to_at = 0, to_stride = 0;
  int64_t rows = 0, cols = 0;
  int64_t numel() const { return rows * cols; }
  friend bool operator==(const Copy&, const Copy&) = default;
};

// What goes from one process to another, in this order.
struct Stream {
  int peer = 0;
  std::vector<Copy> copies;
  int64_t elements = 0;
};

struct Plan {
  int adopt = -1;           // source that is this rank's state already
  std::vector<int> adopts;  // the same of every new rank, or -1
  std::vector<Copy> local;  // from sources of this host
  // In the order of the exchange: by (to - from) modulo the processes, which
  // is what keeps bounded buffers from waiting for each other in a circle.
  std::vector<Stream> receive, send;
  int64_t elements = 0;  // of this rank's vectors
  uint64_t digest = 0;   // of all facts: the same on every process
};

// The part of process `me`. Fails like make_rank_shard(); InvalidArgument when
// a source is of no rank of `from` or there are fewer processes than ranks;
// Unavailable, naming a parameter, when the sources that can be reached do not
// hold all of it. A source is reached by the processes of its host, and by all
// others when there is one.
Result<Plan> plan_exchange(const geometry::ParamTable& table,
                           const geometry::Sharding& from,
                           std::span<const Source> sources,
                           const geometry::Sharding& to,
                           std::span<const Process> processes, int me);

}  // namespace remesh::exchange
