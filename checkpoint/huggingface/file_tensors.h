// The tensors of Hugging Face's files in terms of our parameters. Pure.
//
// Most families have one tensor for each parameter. Phi-3 has the matrices of
// queries, keys and values as one, and those of gate and up. They are
// neighbours in the parameter table, so the elements of a file are in either
// case those of the table, in its order.
#pragma once

#include <cstddef>
#include <vector>

#include "checkpoint/huggingface/safetensors.h"
#include "parallel/geometry/param_table.h"

namespace remesh::huggingface {

struct FileTensor {
  TensorShape tensor;
  size_t first = 0, last = 0;  // parameters, whose rows follow each other
};

// The tensors of all parameters, in the order of the table.
std::vector<FileTensor> file_tensors(const geometry::ParamTable& table);

}  // namespace remesh::huggingface
