// The models that benchmarks measure, by name: the Llama sizes of the stories
// models (karpathy/llama2.c) with a vocabulary of 32,000, and a tiny one.
#pragma once

#include <map>
#include <string>

#include "parallel/geometry/model_config.h"
#include "tests/testing/llama.h"

namespace remesh::bench {

inline const std::map<std::string, geometry::ModelConfig>& models() {
  static const std::map<std::string, geometry::ModelConfig> kModels = {
      {"tiny", geometry::llama(64, 4, 8, 4, 192, 256)},
      {"15m", geometry::llama(288, 6, 6, 6, 768, 32000)},
      {"42m", geometry::llama(512, 8, 8, 8, 1376, 32000)},
      {"110m", geometry::llama(768, 12, 12, 12, 2048, 32000)}};
  return kModels;
}

}  // namespace remesh::bench
