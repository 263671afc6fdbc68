// Compares the results of a training run with a golden file.
#pragma once

#include <span>
#include <vector>

#include "parallel/geometry/param_table.h"
#include "tests/golden/golden_file.h"

namespace remesh::golden {

// What a run gave, gathered from all ranks; flat vectors as in Golden.
struct Outcome {
  std::span<const float> first_logits, first_grads, weights_after;
  std::vector<double> loss, grad_norm, lr;  // of each step
};

StepErrors first_step_errors(const Golden& g, const Outcome& run);

struct Bounds {
  StepErrors first;
  double first_gradients = 0;  // root mean square over all parameters
  // In bf16 it is no smaller than this: else the GEMMs ran in fp32.
  double first_gradients_least = 0;
  double loss = 0, norm = 0;  // of later steps
  double weights = 0;         // all as one vector, after the last step
  std::vector<double> parameter_weights;  // each parameter's
};

Bounds fp32_bounds(const Golden& g);

// When the file says how far PyTorch's autocast is off, a run in bf16 must be
// at least as close. Otherwise `reference` has the errors of the reference
// backend, which rounds the results of operations only and sums in double; a
// run may be off by a small multiple of them. The error of a parameter of few
// elements is a random draw, and may be off by more.
Bounds bf16_bounds(const Golden& g, const StepErrors& reference);

// Prints every error past its bound and the largest of each kind, or every
// error if `verbose`. False if one is past its bound.
bool compare(const Golden& g, const Outcome& run, const Bounds& bounds,
             bool verbose);

}  // namespace remesh::golden
