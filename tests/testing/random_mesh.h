// Random models and the ways in which meshes shard them, for property tests.
#pragma once

#include <initializer_list>
#include <iterator>
#include <random>

#include "parallel/geometry/sharding.h"

namespace remesh::geometry {

inline ModelConfig random_config(std::mt19937& random) {
  const auto pick = [&](std::initializer_list<int64_t> v) {
    return *(v.begin() + static_cast<int64_t>(random() % v.size()));
  };
  ModelConfig c;
  c.n_kv_heads = pick({1, 2, 4});
  c.n_heads = c.n_kv_heads * pick({1, 2, 4});
  c.dim = c.n_heads * pick({2, 4, 6});
  c.n_layers = pick({1, 2, 3, 5, 7});
  c.hidden_dim = pick({9, 16, 37});
  c.vocab_size = pick({17, 31, 32});
  c.tie_embeddings = random() % 2 == 0;
  // Of other numbers, so that a seed goes on to mean the same sizes and mesh.
  std::mt19937 more = random;
  more.discard(1000);
  const char* const families[] = {"llama", "mistral", "qwen2", "qwen3", "phi3"};
  c.arch = families[more() % std::size(families)];
  if (more() % 2 == 0) c.set_head_dim(6);
  if (has_window(c.arch)) c.sliding_window = static_cast<int64_t>(more() % 5);
  return c;
}

// At most max_world ranks. The stages have any sizes, not only balanced ones.
inline Sharding random_sharding(std::mt19937& random, const ModelConfig& c,
                                int max_world) {
  while (true) {
    Sharding s;
    s.layout = {.dp = 1 + static_cast<int>(random() % 4),
                .pp = 1 + static_cast<int>(random() % 3),
                .tp = 1 << random() % 3,
                .cp = 1 + static_cast<int>(random() % 2)};
    if (s.layout.world() > max_world) continue;
    s.chunks = s.layout.pp > 1 && random() % 3 == 0 ? 2 : 1;
    const int n = s.layout.dp * s.layout.cp;
    s.zero = {.stage = static_cast<int>(random() % 4),
              .shard_group = n % 2 == 0 && random() % 2 == 0 ? 2 : 0};
    const int stages = s.layout.pp * s.chunks;
    if (stages > c.n_layers || !validate_layout(c, s.layout).ok()) continue;
    s.bounds = {0};
    for (int i = 1; i < stages; ++i)
      s.bounds.push_back(s.bounds.back() + 1 +
                         static_cast<int64_t>(random()) %
                             (c.n_layers - s.bounds.back() - (stages - i)));
    s.bounds.push_back(c.n_layers);
    return s;
  }
}

}  // namespace remesh::geometry
