// Reads a golden file: a Llama model's sizes, weights and token batches with
// the loss, logits and gradients that PyTorch computed in float64. For this
// folder's tests; a file that does not fit fails the test (CHECK).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/geometry/param_table.h"

namespace remesh::model {

struct GoldenFile {
  geometry::ModelConfig config;
  int64_t B = 0, T = 0;
  std::vector<int32_t> tokens_BT;   // first batch, inputs
  std::vector<int32_t> targets_BT;  // and the token after each
  std::vector<float> weights;       // flat, table order
  double loss = 0;                  // mean over the first batch
  std::vector<float> grads;         // of that mean, flat, table order
  std::vector<float> logits_row0;   // (T, vocab) of sequence 0
};

GoldenFile read_golden(const std::string& path);

}  // namespace remesh::model
