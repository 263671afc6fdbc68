// Trained low-rank adapters (geometry/lora.h), to be added to the model that
// they belong to, or written as files of PEFT.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "checkpoint/huggingface/safetensors.h"
#include "parallel/geometry/slice.h"
#include "proto/base/file_system.h"

namespace remesh::huggingface {

struct Adapters {
  geometry::ParamTable table;
  std::vector<float> values;  // of all its parameters
};

// Adds alpha / rank * B A to the pieces of matrices that have an adapter. The
// places of `pieces`, of the base's table, are in `weights`.
void add_adapters(const Adapters& adapters, const geometry::ParamTable& base,
                  std::span<const geometry::Piece> pieces,
                  std::span<float> weights);

// Writes adapter_config.json and adapter_model.safetensors, as
// peft.PeftModel.from_pretrained() reads them, into a folder that exists.
// `base_path`: of the base. Returns the bytes of the weights. InvalidArgument
// for a family whose files have several matrices as one.
Result<uint64_t> write_peft(FileSystem& fs, const Adapters& adapters,
                            const std::string& base_path, Dtype dtype,
                            const std::string& folder);

}  // namespace remesh::huggingface
