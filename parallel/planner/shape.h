// JobShape: what of a job decides which meshes can run it, how long a step
// takes and how much memory a rank needs. One plain value; the planner's view
// of a job file. Pure.
#pragma once

#include <cstdint>

#include "parallel/geometry/family.h"
#include "parallel/geometry/layout.h"
#include "parallel/geometry/model_config.h"
#include "parallel/geometry/schedule.h"
#include "proto/base/status.h"

namespace remesh::planner {

struct JobShape {
  geometry::ModelConfig model;
  int64_t T = 1;             // tokens a sequence
  int64_t B = 1;             // sequences a microbatch
  int64_t microbatches = 1;  // of a global batch
  bool bf16 = false;         // products in bf16, else in fp32
  // bf16 weights are packed twice, as for AMX: for forward and for backward.
  // Where they are not, memory is foretold a little too high.
  bool packed = true;
  int zero_stage = 0;
  int shard_group = 0;  // as asked for; 0: the whole data group
  geometry::ScheduleKind schedule = geometry::ScheduleKind::k1F1B;
  int chunks = 1;  // model chunks a rank, where there is a pipeline
  geometry::Recompute recompute = geometry::Recompute::kNone;
  int recompute_every = 1;
  // The state lies in shared memory, twice, and so often on other workers.
  bool keep_state = false;
  int replicas = 0;  // losses that it must survive; 0: none is kept
  // Steps from one replica to the next; above 1 a rank also keeps its own state
  // of the last such step.
  int64_t replicate_every = 1;
  friend bool operator==(const JobShape&, const JobShape&) = default;
};

// Whether the mesh can run the job, whatever the slots: the model can be cut
// that way, every data-parallel rank has a microbatch, each context-parallel
// rank two equal parts of a sequence, and each stage a layer. The message says
// what is allowed.
Status admit(const JobShape& shape, const geometry::Layout& layout);

// Model chunks a rank has on that mesh: 1 without a pipeline.
int chunks_on(const JobShape& shape, const geometry::Layout& layout);

// Ranks that share one copy of what ZeRO shards: the largest divisor of
// dp * cp that is not above what was asked for; 1 with zero_stage 0.
int shard_group_on(const JobShape& shape, const geometry::Layout& layout);

// The order of passes on that mesh: without a pipeline 1F1B, which holds one
// microbatch; without chunks interleaved order is 1F1B as well.
geometry::ScheduleKind schedule_kind_on(const JobShape& shape,
                                        const geometry::Layout& layout);
// The passes of a step. Every data-parallel rank walks the list made for the
// one with most microbatches, in interleaved order for the next multiple of
// pp, and leaves out what it has not. REQUIRES: admit() passed.
geometry::Schedule schedule_on(const JobShape& shape,
                               const geometry::Layout& layout);

// Microbatches of the data-parallel rank that has most.
int64_t most_microbatches(const JobShape& shape,
                          const geometry::Layout& layout);

}  // namespace remesh::planner
