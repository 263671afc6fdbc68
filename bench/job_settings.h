// Settings of a cluster's job (tests/testing/cluster.h) for a model of
// options.h.
#pragma once

#include <string>

#include "bench/options.h"
#include "tests/testing/cluster.h"

namespace remesh::bench {

inline void set_model(const std::string& name, testing::Settings& s) {
  const geometry::ModelConfig& m = models().at(name);
  s["model.dim"] = std::to_string(m.dim);
  s["model.n_layers"] = std::to_string(m.n_layers);
  s["model.n_heads"] = std::to_string(m.n_heads);
  s["model.n_kv_heads"] = std::to_string(m.n_kv_heads);
  s["model.hidden_dim"] = std::to_string(m.hidden_dim);
  s["model.vocab_size"] = std::to_string(m.vocab_size);
}

}  // namespace remesh::bench
