// estimate_step: the time of a step on a mesh, by a model small enough to check
// by hand. It ranks meshes of the same number of ranks; the seconds are only as
// good as the hardware numbers.
//
// Model, for the data-parallel rank with most microbatches (m of them), N =
// B T / cp tokens each:
//   compute  m (F + B + W) of the heaviest stage (model_work.h): once forward
//            and once for each gradient (F = B = W), once more for recomputed
//            activations; a rank computes with its share of the cores.
//   bubble   (pp - 1) (F + B + W) for GPipe and 1F1B, 1/v of it interleaved
//            (Narayanan et al., SC'21), (pp - 1) (F + B - W) for ZB-H1 (Qi et
//            al. 2023): ScheduleTraits::bubble.
//   tp       eight gathers and scatters of the stream (N, dim) a layer and
//            microbatch, all exposed (Korthikanti et al. 2022).
//   cp       keys and values (cp - 1) times around the ring in forward, twice
//            that in backward; the part longer than attention is exposed.
//   pp       the stream to the next stage and its gradient back, once.
//   dp       fp32 gradients reduced in a ring over dp x cp ranks (ZeRO 1 and 2
//            also gather weights, with the same total volume); the part longer
//            than a microbatch's backward is exposed. ZeRO-3 gathers weights
//            for every forward and backward; the part longer than those is
//            exposed.
// A message takes the link's latency plus its bytes over the bandwidth.
// Tensor-parallel groups are on one host where they fit.
#pragma once

#include <cstdint>

#include "parallel/planner/shape.h"

namespace remesh::planner {

struct Hardware {
  int ranks_per_host = 1;            // at most
  double cores_per_rank = 1;         // 0.5: two ranks share a core
  double flops_per_core = 1e11;      // of GEMMs
  double host_bytes_per_s = 5e9;     // between ranks of one host
  double network_bytes_per_s = 1e9;  // between hosts
  double latency_s = 30e-6;
  friend bool operator==(const Hardware&, const Hardware&) = default;
};

struct StepEstimate {
  double compute_s = 0;
  double bubble_s = 0;
  double exposed_s = 0;  // communication
  double total_s() const { return compute_s + bubble_s + exposed_s; }
};

// REQUIRES: admit() passed.
StepEstimate estimate_step(const JobShape& shape,
                           const geometry::Layout& layout,
                           const Hardware& hardware);

}  // namespace remesh::planner
