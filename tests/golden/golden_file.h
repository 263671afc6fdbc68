// Golden files: a small model with weights, tokens and the results of training,
// computed in float64 by PyTorch, or by make_golden.py, which agrees with it
// (attribute `source`).
//
//   attributes  config.*, optimizer.*
//   /tokens               int32 (steps, sequences, T + 1)
//   /weights/NAME         before the first step
//   /first/loss, /first/grads/NAME, /first/logits_row0 (T, V)
//   /train/{loss,grad_norm,lr} (steps), /train/weights_after/NAME
//   /autocast_bf16        optional: the relative errors of PyTorch's bf16
//                         autocast in /first: attributes loss and logits_row0,
//                         /autocast_bf16/grads/NAME
//
// Flat vectors are in the order of the ParamTable.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parallel/geometry/param_table.h"
#include "parallel/jobfile/lr_schedule.h"
#include "proto/base/status.h"
#include "worker/engine/optimizer.h"

namespace remesh::golden {

// Relative errors of a first step: of the loss, and relative L2 errors of the
// logits of sequence 0 and of each parameter's gradient.
struct StepErrors {
  double loss = 0, logits = 0;
  std::vector<double> gradients;
};

struct Golden {
  geometry::ModelConfig config;
  jobfile::LrSchedule schedule;
  engine::OptimizerOptions optimizer;
  int64_t steps = 0, sequences = 0, seq_len = 0;
  std::vector<int32_t> tokens;  // steps * sequences * (seq_len + 1)
  std::vector<float> weights;
  double first_loss = 0;
  std::vector<float> first_grads;
  std::vector<float> first_logits;  // seq_len * vocab_size, sequence 0
  std::vector<double> loss, grad_norm, lr;
  std::vector<float> weights_after;
  std::optional<StepErrors> autocast;
};

// Fails, naming file and object, on a file that is missing, not HDF5, or not
// of this form (sizes that do not fit the configuration, tokens out of range).
Result<Golden> read_golden(const std::string& path);

}  // namespace remesh::golden
