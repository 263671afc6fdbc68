// estimate_step: how long a step takes on a mesh, by a model small enough to
// check by hand. It ranks meshes of the same number of ranks; the seconds are
// right only as far as the hardware numbers are.
//
// Model, of the data-parallel rank with most microbatches (m of them), N =
// B T / cp tokens each:
//   compute  m (F + B + W) of the heaviest stage: a product of R x C takes
//            2 N R C / tp operations, causal attention 2 N T dim / tp, once
//            forward and once for each gradient (F = B = W), once more where
//            it is recomputed; a rank computes with its share of the cores.
//   bubble   (pp - 1) (F + B + W) for GPipe and 1F1B, 1/v of it interleaved
//            (Narayanan et al., SC'21), (pp - 1) (F + B - W) for ZB-H1 (Qi et
//            al. 2023).
//   tp       eight gathers and scatters of the stream (N, dim) a layer and
//            microbatch, all exposed (Korthikanti et al. 2022).
//   cp       keys and values (cp - 1) times round the ring forward, twice that
//            backward; exposed where longer than attention takes.
//   pp       the stream to the next stage and its gradient back, once round.
//   dp       fp32 gradients reduced in a ring over dp x cp ranks (weights
//            gathered for ZeRO 1 and 2 make up the same volume); exposed where
//            longer than a microbatch's backward. ZeRO-3 gathers weights for
//            every forward and backward; exposed where longer than those.
// Messages between ranks take their bytes over the link's bandwidth plus its
// latency. Tensor-parallel groups are on one host where they fit.
#pragma once

#include <cstdint>

#include "parallel/planner/shape.h"

namespace remesh::planner {

struct Hardware {
  int ranks_per_host = 1;            // at most
  double cores_per_rank = 1;         // 0.5: two ranks share a core
  double flops_per_core = 1e11;      // of matrix products
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
