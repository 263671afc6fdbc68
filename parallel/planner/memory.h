// predict_memory: bytes that a rank of a mesh holds while it trains, by what
// they are for. A formula from what the trainer is documented to allocate
// (worker/model, worker/engine), written independently of it, so that the two
// check each other. Pure.
//
//   weights      fp32: the rank's share of the master weights (twice, where
//                the state is kept in shared memory), and under ZeRO the
//                gathered copies
//   gradients    fp32: all of the shard, or with ZeRO 2 and 3 and one
//                microbatch a step a few units' and the rank's share
//   optimizer    both moments of AdamW, fp32: the rank's share (twice, too)
//   activations  what microbatches in flight keep for their backward
//   buffers      weights in bf16 to compute with, one layer's activations and
//                gradients, messages, tables; replicas of other ranks' states
//
// What a process takes without any of this (code, MPI, thread stacks) is not in
// it.
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

// Most replicas that any rank keeps for others, when each is on a worker of its
// own: data-parallel ranks that hold the same state are copies already.
int64_t replicas_kept(const JobShape& shape, const geometry::Layout& layout);

// Of one rank. REQUIRES: admit() passed, 0 <= rank < layout.world().
Memory predict_memory(const JobShape& shape, const geometry::Layout& layout,
                      int rank);

// Of the rank that needs most in all. REQUIRES: admit() passed.
Memory predict_worst_memory(const JobShape& shape,
                            const geometry::Layout& layout);

}  // namespace remesh::planner
