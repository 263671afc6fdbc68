// The models that benchmarks measure, by name: the Llama sizes of the stories
// models (karpathy/llama2.c) with a vocabulary of 32,000, and a tiny one.
#pragma once

#include <map>
#include <string>

#include "parallel/geometry/model_config.h"

namespace remesh::bench {

inline const std::map<std::string, geometry::ModelConfig>& models() {
  static const std::map<std::string, geometry::ModelConfig> kModels = {
      {"tiny",
       {.dim = 64,
        .n_layers = 4,
        .n_heads = 8,
        .n_kv_heads = 4,
        .hidden_dim = 192,
        .vocab_size = 256}},
      {"15m",
       {.dim = 288,
        .n_layers = 6,
        .n_heads = 6,
        .n_kv_heads = 6,
        .hidden_dim = 768,
        .vocab_size = 32000}},
      {"42m",
       {.dim = 512,
        .n_layers = 8,
        .n_heads = 8,
        .n_kv_heads = 8,
        .hidden_dim = 1376,
        .vocab_size = 32000}},
      {"110m",
       {.dim = 768,
        .n_layers = 12,
        .n_heads = 12,
        .n_kv_heads = 12,
        .hidden_dim = 2048,
        .vocab_size = 32000}}};
  return kModels;
}

}  // namespace remesh::bench
