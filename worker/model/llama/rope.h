// Tables of the rotary embedding (Su et al. 2021), with the frequency scaling
// of Llama 3.1. Pure; computed in double, rounded once.
#pragma once

#include <cstdint>
#include <vector>

#include "parallel/geometry/model_config.h"

namespace remesh::model {

// Angular frequency of each pair of a head's elements, head_dim / 2 of them.
std::vector<double> rope_frequencies(const geometry::ModelConfig& config);

struct RopeTables {
  std::vector<float> cos, sin;  // (T, head_dim / 2)
};

// The tables where the backend reads them.
struct RopeView {
  float* cos = nullptr;
  float* sin = nullptr;
};

RopeTables make_rope_tables(const geometry::ModelConfig& config, int64_t T);

}  // namespace remesh::model
