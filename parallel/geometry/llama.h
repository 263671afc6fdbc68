// The Llama family: Llama 2 and 3, and whatever has their shapes.
//
// Query and key rows are in half-split rotary order, as in Hugging Face's
// checkpoints.
#pragma once

#include <vector>

#include "parallel/geometry/param_table.h"

namespace remesh::geometry {

// Order: embedding; for each layer input norm, q, k, v, o, post-attention norm,
// gate, up, down; final norm; head unless tied.
std::vector<ParamSpec> llama_parameters(const ModelConfig& config);

}  // namespace remesh::geometry
