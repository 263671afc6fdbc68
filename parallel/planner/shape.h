// JobShape: the planner's view of a job file: what decides which meshes can run
// the job, how long a step takes and how much memory a rank needs. A plain
// value. Pure.
#pragma once

#include <cstdint>

#include "parallel/geometry/batch.h"
#include "parallel/geometry/family.h"
#include "parallel/geometry/layout.h"
#include "parallel/geometry/model_config.h"
#include "parallel/geometry/schedule.h"
#include "proto/base/status.h"

namespace remesh::planner {

inline double as_double(int64_t n) { return static_cast<double>(n); }

struct JobShape {
  geometry::ModelConfig model;
  int64_t T = 1;             // tokens per sequence
  int64_t B = 1;             // sequences per microbatch
  int64_t microbatches = 1;  // of a global batch
  // The shares in meshes with so many data-parallel ranks; otherwise even.
  geometry::Shares shares;
  bool bf16 = false;  // GEMMs in bf16, else in fp32
  // bf16 weights are packed twice, as for AMX: for forward and for backward.
  // Where they are not, the estimate of memory is slightly high.
  bool packed = true;
  int zero_stage = 0;
  int shard_group = 0;  // as requested; 0: the data group
  geometry::ScheduleKind schedule = geometry::ScheduleKind::k1F1B;
  int chunks = 1;  // model chunks per rank of a pipeline
  geometry::Recompute recompute = geometry::Recompute::kNone;
  int recompute_every = 1;
  // The state is double-buffered in shared memory, with replicas on others.
  bool keep_state = false;
  int replicas = 0;  // losses that the state survives; 0: no replicas
  // Steps between replicas; above 1 a rank also keeps its own state of the last
  // replicated step.
  int64_t replicate_every = 1;
  friend bool operator==(const JobShape&, const JobShape&) = default;
};

// Whether the mesh can run the job, whatever the slots: geometry::check_mesh().
Status admit(const JobShape& shape, const geometry::Layout& layout);

// Model chunks per rank on that mesh: 1 without a pipeline.
int chunks_on(const JobShape& shape, const geometry::Layout& layout);

// Ranks that share one copy of what ZeRO shards: the largest divisor of dp * cp
// up to the requested size; 1 with zero_stage 0.
int shard_group_on(const JobShape& shape, const geometry::Layout& layout);

// The schedule on that mesh: 1F1B without a pipeline, where it holds one
// microbatch; 1F1B also in place of an interleaved one without chunks.
geometry::ScheduleKind schedule_kind_on(const JobShape& shape,
                                        const geometry::Layout& layout);
// The passes of a step of so many microbatches (geometry::step_schedule).
// REQUIRES: admit() passed.
geometry::Schedule schedule_on(const JobShape& shape,
                               const geometry::Layout& layout,
                               int64_t microbatches);

// Microbatches of the data-parallel rank with most.
int64_t most_microbatches(const JobShape& shape,
                          const geometry::Layout& layout);

// simulate(n): the time of a step of n microbatches. A long schedule repeats
// itself in its middle, so that its time is linear in n: two short ones give
// it, if settled() finds that both are long enough to have a middle.
template <typename Simulate, typename Settled>
auto step_time(int64_t n, int pp, const Simulate& simulate,
               const Settled& settled) {
  constexpr int64_t kMostRounds = 24;
  for (int64_t rounds = 3;; rounds *= 2) {
    const int64_t first = rounds * pp + n % pp, second = first + pp;
    if (n <= second) return simulate(n);
    const auto a = simulate(first), b = simulate(second);
    if (rounds < kMostRounds && !settled(a, b)) continue;
    const double periods = static_cast<double>(n - first) / pp;
    return a + periods * (b + -1.0 * a);
  }
}

}  // namespace remesh::planner
