// config.json of a Hugging Face model: its family and sizes. Pure.
//
// Both forms are read and written: rope_theta with rope_scaling as before
// transformers 5, and rope_parameters since. A setting that changes the
// arithmetic and that no family here has is refused by name: the architecture,
// the type of the rotary embedding, the activation, biases, quantization. Those
// of training alone, such as attention_dropout, are ignored: there is no
// dropout here.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/huggingface/safetensors.h"
#include "parallel/geometry/model_config.h"
#include "proto/base/status.h"

namespace remesh::huggingface {

struct Config {
  geometry::ModelConfig model;
  int64_t max_position = 2048;  // max_position_embeddings
  // Tokens that begin and end a text, as JSON: an integer or a list of them;
  // "": the file does not say.
  std::string bos_token_id, eos_token_id;
  std::string pad_token_id;
};

// Corrupt if the text is not a JSON object; InvalidArgument, naming the key,
// its value and what is allowed, if the model is none that can be computed.
Result<Config> parse_config(std::string_view text, const std::string& name);

// What a plan needs: family, sizes, window and max_position. Accepts models
// whose arithmetic parse_config() refuses, such as another rotary embedding.
// The rest keeps its defaults. Fails as parse_config() does.
Result<Config> parse_shape(std::string_view text, const std::string& name);

// The keys of these tokens in Hugging Face's files, and what Config has of
// them.
std::vector<std::pair<const char*, std::string>> token_ids(
    const Config& config);

// The text of a config.json that parse_config() and transformers read.
// `dtype`: of the weights beside it.
std::string config_json(const Config& config, Dtype dtype);

}  // namespace remesh::huggingface
