// predict_memory: bytes that a rank of a mesh holds while it trains, by
// purpose. A formula for what the trainer is documented to allocate
// (worker/engine, and geometry/family.h for a model chunk), written
// independently of it, so that the two check each other. Pure.
//
//   weights      fp32: the rank's share of the master weights (twice when the
//                state is kept in shared memory), and under ZeRO the gathered
//                copies
//   gradients    fp32: all of the shard, or with ZeRO 2 and 3 and one
//                microbatch per step those of a few units and the rank's share
//   optimizer    both moments of AdamW, fp32: the rank's share (also twice)
//   activations  kept by microbatches in flight for their backward
//   buffers      weights in bf16 to compute with, one layer's activations and
//                gradients, messages, tables; replicas of other ranks' states
//
// Code, MPI and thread stacks are not included.
#pragma once

#include <cstdint>

#include "parallel/planner/shape.h"

namespace remesh::planner {

struct Memory {
  uint64_t weights = 0;
  uint64_t gradients = 0;
  uint64_t optimizer = 0;
  uint64_t activations = 0;
  uint64_t buffers = 0;
  uint64_t total() const {
    return weights + gradients + optimizer + activations + buffers;
  }
  friend bool operator==(const Memory&, const Memory&) = default;
};

// The most replicas that any rank keeps for others when each rank has its own
// worker. Data-parallel ranks that hold the same state are copies already.
int64_t replicas_kept(const JobShape& shape, const geometry::Layout& layout);

// For one rank. REQUIRES: admit() passed, 0 <= rank < layout.world().
Memory predict_memory(const JobShape& shape, const geometry::Layout& layout,
                      int rank);

// What a rank needs besides, of which predict_memory() has nothing and
// place_mesh() knows nothing. REQUIRES: as above.
//
// From its first save of a checkpoint on, since the memory is kept for the next
// one: a copy of the part of the state that it saves; with a private state,
// which is copied before, buffers of the file as well.
uint64_t predict_save(const JobShape& shape, const geometry::Layout& layout,
                      int rank);
// Of predict_memory(), the segments in shared memory: its state and the
// replicas. In a mesh change those of the old mesh come on top of what the new
// mesh needs.
uint64_t predict_segments(const JobShape& shape, const geometry::Layout& layout,
                          int rank);

// For the rank that needs most in total. REQUIRES: admit() passed.
Memory predict_worst_memory(const JobShape& shape,
                            const geometry::Layout& layout);

}  // namespace remesh::planner
