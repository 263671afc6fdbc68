// Random models and meshes for the tests, and states whose every bit is a
// function of (parameter, element, vector).
#pragma once

#include <cstring>
#include <initializer_list>
#include <random>
#include <vector>

#include "checkpoint/memory/segment.h"
#include "parallel/geometry/sharding.h"
#include "proto/base/rng.h"
#include "tests/testing/pieces.h"

namespace remesh::exchange {

inline geometry::ModelConfig random_config(std::mt19937& random) {
  const auto pick = [&](std::initializer_list<int64_t> v) {
    return *(v.begin() + static_cast<int64_t>(random() % v.size()));
  };
  geometry::ModelConfig c;
  c.n_kv_heads = pick({1, 2, 4});
  c.n_heads = c.n_kv_heads * pick({1, 2});
  c.dim = c.n_heads * pick({2, 4});
  c.n_layers = pick({2, 3, 5});
  c.hidden_dim = pick({9, 16});
  c.vocab_size = pick({17, 31});
  c.tie_embeddings = random() % 2 == 0;
  return c;
}

// At most max_world ranks.
inline geometry::Sharding random_sharding(std::mt19937& random,
                                          const geometry::ModelConfig& c,
                                          int max_world) {
  while (true) {
    geometry::Sharding s;
    s.layout = {.dp = 1 + static_cast<int>(random() % 4),
                .pp = 1 + static_cast<int>(random() % 3),
                .tp = 1 << random() % 3,
                .cp = 1 + static_cast<int>(random() % 2)};
    if (s.layout.world() > max_world) continue;
    s.chunks = s.layout.pp > 1 && random() % 3 == 0 ? 2 : 1;
    const int n = s.layout.dp * s.layout.cp;
    s.zero = {.stage = static_cast<int>(random() % 4),
              .shard_group = n % 2 == 0 && random() % 2 == 0 ? 2 : 0};
    // Any bounds, not only balanced ones.
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

struct State {
  std::vector<float> v[geometry::kNumStateVectors];
  explicit State(int64_t n = 0) {
    for (auto& x : v) x.assign(static_cast<size_t>(n), -1.0F);
  }
  geometry::StateView mut() { return {v[0], v[1], v[2]}; }
  geometry::ConstStateView view() const { return {v[0], v[1], v[2]}; }
};

inline uint32_t bits_at(uint64_t salt, size_t param, int64_t e, size_t vector) {
  uint64_t x = salt + param * 1000003 + static_cast<uint64_t>(e) * 3 + vector;
  x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15ULL;
  return static_cast<uint32_t>(x >> 20);
}

inline State state_of(const geometry::ParamTable& table,
                      const geometry::Sharding& s, int rank, uint64_t salt) {
  const auto shard = make_rank_shard(table, s, rank);
  CHECK_MSG(shard.ok(), shard.status().to_string().c_str());
  State out(shard->zero.state_elements());
  for_each_element(
      table, held_pieces(*shard), [&](int64_t at, size_t param, int64_t e) {
        for (size_t v = 0; v < geometry::kNumStateVectors; ++v) {
          const uint32_t bits = bits_at(salt, param, e, v);
          std::memcpy(&out.v[v][static_cast<size_t>(at)], &bits, sizeof(bits));
        }
      });
  return out;
}

inline bool same_bits(const State& a, const State& b) {
  for (size_t v = 0; v < geometry::kNumStateVectors; ++v)
    if (a.v[v].size() != b.v[v].size() ||
        (!a.v[v].empty() && std::memcmp(a.v[v].data(), b.v[v].data(),
                                        a.v[v].size() * sizeof(float)) != 0))
      return false;
  return true;
}

}  // namespace remesh::exchange
