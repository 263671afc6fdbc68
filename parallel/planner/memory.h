// predict_memory: bytes that a rank of a mesh holds while it trains, by
// purpose. Pure. For two kinds of trainers, which differ in what they keep of
// each parameter (StateBytes in memory.cc) and in the activations:
//
// remesh's own ranks. A formula for what the trainer is documented to allocate
// (worker/engine, and geometry/family.h for a model chunk), written
// independently of it, so that the two check each other:
//   weights      fp32: the rank's share of the master weights (twice when the
//                state is kept in shared memory), and under ZeRO the gathered
//                copies
//   gradients    fp32: all of the shard, or with ZeRO 2 and 3 and one
//                microbatch per step those of a few units and the rank's share
//   optimizer    both moments of AdamW, fp32: the rank's share (also twice)
//   activations  kept by microbatches in flight for their backward
//   buffers      weights in bf16 to compute with, one layer's activations and
//                gradients, messages, tables; replicas of other ranks' states
// With adapters the first three are theirs, and the frozen model in fp32 is
// added to the weights. Code, MPI and thread stacks are not included.
//
// Trainers on devices (given by an Execution), after Korthikanti et al. 2022
// and, for ZeRO, Rajbhandari et al. 2020 and Zhao et al. 2023:
//   weights      fp32 master weights, the rank's share; 16-bit ones to compute
//                with, under ZeRO 3 those of two layers and the vocabulary
//   gradients    Execution::gradient_bytes each: all, or under ZeRO 2 and 3
//                the share and those of a layer. In a pipeline stages 2 and 3
//                keep what stage 1 keeps (step_cost.h).
//   optimizer    both moments, fp32: the share
//   activations  of the microbatches in flight; on the last stage also the
//                inputs of the norm and the head, and the logits in fp32
//   buffers      what recomputation fills for one layer; 16-bit logits
// Not included: libraries, communication buffers, fragmentation; kUsable
// leaves room for them.
#pragma once

#include <cstdint>
#include <memory>

#include "parallel/planner/layer_cost.h"
#include "parallel/planner/shape.h"
#include "proto/base/memory_use.h"

namespace remesh::planner {

// The most replicas that any rank keeps for others when each rank has its own
// worker. Data-parallel ranks that hold the same state are copies already.
int64_t replicas_kept(const JobShape& shape, const geometry::Layout& layout);

// For one rank. REQUIRES: admit() passed, 0 <= rank < layout.world().
MemoryUse predict_memory(const JobShape& shape, const geometry::Layout& layout,
                         int rank);

// What a rank needs besides, of which predict_memory() has nothing and
// place_mesh() knows nothing. REQUIRES: as above.
//
// From its first save of a checkpoint on, since the memory is kept for the next
// one: a copy of the part of the state that it saves; with a private state,
// which is copied before, buffers of the file as well.
uint64_t predict_save(const JobShape& shape, const geometry::Layout& layout,
                      int rank);
// What a rank with so many threads uses inside of operations, at most, of which
// predict_memory() has nothing either. Kernels: copies of a matrix in the order
// of AMX, and of a sequence's keys and values, with their gradients, for each
// thread (worker/kernels/cpu). Sums of gradients: what arrives from others.
uint64_t predict_workspace(const JobShape& shape,
                           const geometry::Layout& layout, int threads);

// The part of predict_memory() that is in shared memory: the rank's state and
// the replicas. In a mesh change those of the old mesh come on top of what the
// new mesh needs.
uint64_t predict_segments(const JobShape& shape, const geometry::Layout& layout,
                          int rank);

// For the rank that needs most in total. REQUIRES: admit() passed.
MemoryUse predict_worst_memory(const JobShape& shape,
                               const geometry::Layout& layout);

// The same for many meshes of one job: what their stages have in common is
// computed once.
class MemoryPredictor {
 public:
  explicit MemoryPredictor(JobShape shape);
  ~MemoryPredictor();
  // REQUIRES: as predict_worst_memory().
  MemoryUse worst(const geometry::Layout& layout);

 private:
  struct Known;
  const JobShape shape_;
  std::unique_ptr<Known> known_;
};

// A lower bound of that total which takes no tables. `parameters`: elements of
// the model.
uint64_t least_memory(const JobShape& shape, const geometry::Layout& layout,
                      int64_t parameters);

// For a device of pipeline rank `pp_rank`. REQUIRES: as predict_step().
MemoryUse predict_memory(const JobShape& shape, const geometry::Layout& layout,
                         int pp_rank, const Execution& run, const Parts& parts);
// For the device that needs most: of the first stage, which holds most
// microbatches, or of the last, which has the head.
MemoryUse predict_worst_memory(const JobShape& shape,
                               const geometry::Layout& layout,
                               const Execution& run, const Parts& parts);
// The share of a device's memory that a plan may use.
inline constexpr double kUsable = 0.9;

}  // namespace remesh::planner
