// ModelWork: how much a model computes, from its parameter table. Every FLOP
// count starts here: the split into pipeline stages, the planner's estimate of
// a step, and the rate that the trainer reports.
//
// Counted are the GEMMs with the weights and causal attention (Narayanan et
// al., SC'21; Korthikanti et al. 2022), in multiply-adds of one token in the
// forward pass. A multiply-add is two floating-point operations; backward takes
// twice the forward.
#pragma once

#include <cstdint>

#include "parallel/geometry/param_table.h"

namespace remesh::geometry {

struct ModelWork {
  double block = 0;      // GEMMs of one layer: elements of its matrices
  double attention = 0;  // scores and values of one layer, the mean token
  double head = 0;       // projection onto the vocabulary
};

// Keys that the mean token of a sequence of T attends to: half of the tokens,
// or fewer where the model has a window.
double mean_keys(const ModelConfig& config, int64_t T);

// In sequences of T tokens. All layers have the same sizes.
ModelWork work_per_token(const ModelConfig& config, int64_t T);

// Floating-point operations of forward and backward of one token in a sequence
// of T, nothing recomputed: 6 for each parameter except those of the embedding
// (a tied one counts once, as the projection), and attention. With adapters 4
// for those of a matrix that has none: its gradient is not computed.
double flops_per_token(const ModelConfig& config, int64_t T);

}  // namespace remesh::geometry
