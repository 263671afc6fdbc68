// Models in formats other than Hugging Face's, brought to its names and shapes.
// Pure.
//
//   llama2.c   one file (github.com/karpathy/llama2.c): version 0, whose header
//              is seven integers, and version 1
//   Meta       params.json and consolidated.safetensors, with Meta's names of
//              tensors, as Llama and Mistral have them
//
// Both have the rows of queries and keys in pairs that rotate together
// (interleaved), not in two halves as Hugging Face.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/huggingface/config.h"
#include "checkpoint/huggingface/safetensors.h"

namespace remesh::huggingface {

struct NamedTensors {
  Config config;
  Tensors tensors;  // by Hugging Face's names
};

// A file of llama2.c, which must outlive the tensors. Corrupt if its sizes do
// not fit its header, InvalidArgument if it is quantized or no such model.
Result<NamedTensors> parse_llama2c(std::span<const std::byte> file,
                                   const std::string& name);

// The tensors of a consolidated file and the params.json beside it. Fails like
// parse_config(); a key that is not known is refused by name, unless it is null
// or false, and so is a tensor whose name is not one of Meta's.
Result<NamedTensors> parse_consolidated(std::string_view params,
                                        const Tensors& tensors,
                                        const std::string& name);

// The row of an interleaved matrix that is row `row` of one in halves.
int64_t interleaved_row(int64_t row, int64_t head_dim);

}  // namespace remesh::huggingface
