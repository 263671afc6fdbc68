// Low-rank adapters as parameters (Lora, model_config.h).
//
// An adapter's parameters have the role, the layer and, in the dimension that
// tensor parallelism splits, the units of the matrix they are added to, so that
// a rank holds just what belongs to its part of the matrix. The factor that has
// no such dimension is replicated over the tensor-parallel ranks: each has a
// part of its gradient, as of a norm's.
#pragma once

#include <string>
#include <vector>

#include "parallel/geometry/param_table.h"

namespace remesh::geometry {

// The matrices of a layer that can have adapters, by their last name in Hugging
// Face's checkpoints: q_proj, ...
const std::vector<std::string>& lora_targets();

// rank 0, or at least 1 with a positive alpha and targets of the list, in its
// order.
Status validate_lora(const Lora& lora);

// Whether it is a target.
bool has_adapter(const ParamSpec& matrix, const Lora& lora);

// For each target of each layer, in the order of `base`: A (rank, in), named
// MATRIX.lora_A.weight, and B (out, rank), MATRIX.lora_B.weight. A begins with
// the variance of PEFT's, 1 / (3 in), and B with zeros, so that the model is
// the base at first.
std::vector<ParamSpec> lora_parameters(const std::vector<ParamSpec>& base,
                                       const Lora& lora);

// What is added to an adapter's name here for its name in PEFT's files.
inline constexpr char kPeftPrefix[] = "base_model.model.";

}  // namespace remesh::geometry
