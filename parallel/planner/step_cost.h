// predict_step: the time of a training step on a mesh, by cause. Pure.
//
// Layers are composed operation by operation (layer_cost.h), the passes of all
// pipeline ranks by a simulation of the schedule that the engine runs
// (geometry::replay), data-parallel communication by what overlaps with what:
//
//   ZeRO 0, 1   gradients are reduced after the last microbatch, behind its
//               backward if Execution::overlap_data; stage 1 gathers weights
//               behind the first forward.
//   ZeRO 2, 3   every microbatch gathers each layer's weights behind the layer
//               before it, again in backward with stage 3, and scatters its
//               gradients (FSDP, Zhao et al. 2023). In a pipeline, where that
//               would be for each of many short passes, they are as stage 1.
//   HSDP        the shards' gradients are also reduced across replicas.
//               Execution::accumulates: what remesh's own ranks do instead.
//   overlap     communication takes cores and memory bandwidth from compute:
//               Machine::contention of the hidden time.
//   optimizer   AdamW moves kOptimizerBytes for each element of the rank.
//   stragglers  all wait for the slowest of n devices: slowest_of(n) standard
//               deviations.
#pragma once

#include "parallel/planner/layer_cost.h"

namespace remesh::planner {

// The expected maximum of n normally distributed numbers, in standard
// deviations above their mean, within 5 % (Blom 1958, with the quantile of
// Abramowitz and Stegun 26.2.23). REQUIRES: n >= 1.
double slowest_of(int n);

struct StepCost {
  Terms terms;  // of the rank that has most to do
  double total_s = 0;
  double tokens_per_s = 0;  // of one device
  double mfu = 0;           // of peak_flops(), attention counted as half
};

// REQUIRES: the layout divides the model; at least a microbatch for each
// data-parallel rank.
StepCost predict_step(const Machine& machine, const JobShape& shape,
                      const geometry::Layout& layout, const Execution& run);
// The same from what parts_of() returns.
StepCost predict_step(const Machine& machine, const JobShape& shape,
                      const geometry::Layout& layout, const Execution& run,
                      const Parts& parts);

// A lower bound of total_s that takes microseconds: a pipeline rank waits for
// the first microbatch to reach it, does its work, and waits for the last
// gradients to reach the first rank. Exact without a pipeline, and for 1F1B and
// interleaved schedules of equal stages.
double step_lower_bound_s(const Machine& machine, const JobShape& shape,
                          const geometry::Layout& layout, const Execution& run,
                          const Parts& parts);

}  // namespace remesh::planner
