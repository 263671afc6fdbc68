// States whose every bit is a function of (parameter, element, vector).
#pragma once

#include <cstring>
#include <vector>

#include "checkpoint/memory/segment.h"
#include "parallel/geometry/sharding.h"
#include "proto/base/rng.h"
#include "tests/testing/pieces.h"
#include "tests/testing/random_mesh.h"

namespace remesh::exchange {

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
