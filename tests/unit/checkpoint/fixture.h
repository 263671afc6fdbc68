// Fixture of the checkpoint tests: a small model, a state of random bits, and
// saving and loading it the way ranks do.
#pragma once

#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/manifest/scan.h"
#include "checkpoint/store/store.h"
#include "tests/testing/llama.h"
#include "tests/testing/pieces.h"

namespace remesh::store {

inline geometry::ModelConfig tiny_model() {
  return geometry::llama(8, 1, 2, 1, 12, 11);
}

inline geometry::ModelConfig smallest_model() {
  return geometry::llama(2, 1, 1, 1, 1, 2, /*tied=*/true);
}

struct State {
  std::vector<float> weights, exp_avg, exp_avg_sq;
  explicit State(int64_t n = 0, float fill = 0)
      : weights(static_cast<size_t>(n), fill),
        exp_avg(weights),
        exp_avg_sq(weights) {}
  geometry::ConstStateView view() const {
    return {weights, exp_avg, exp_avg_sq};
  }
  geometry::StateView view() { return {weights, exp_avg, exp_avg_sq}; }
};

// A state may hold any bit pattern, including NaNs, infinities and denormals.
inline State random_state(int64_t n, uint64_t seed) {
  std::mt19937_64 rng(seed);
  State s(n);
  for (auto* tensor : {&s.weights, &s.exp_avg, &s.exp_avg_sq})
    for (float& x : *tensor) {
      const auto bits = static_cast<uint32_t>(rng());
      std::memcpy(&x, &bits, sizeof x);
    }
  return s;
}

inline bool same_bits(const std::vector<float>& a,
                      const std::vector<float>& b) {
  return a.size() == b.size() &&
         std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
inline bool same_bits(const State& a, const State& b) {
  return same_bits(a.weights, b.weights) && same_bits(a.exp_avg, b.exp_avg) &&
         same_bits(a.exp_avg_sq, b.exp_avg_sq);
}

// Even shares, without regard to rows or parameters.
inline std::pair<int64_t, int64_t> share(int64_t n, int ranks, int rank) {
  return {n * rank / ranks, n * (rank + 1) / ranks};
}

inline pb::Manifest manifest_of(const geometry::ParamTable& table,
                                const SaveId& id) {
  pb::Manifest m;
  m.set_job("test");
  m.set_step(id.step);
  m.set_generation(id.generation);
  *m.mutable_model() = manifest::model_info(table.config());
  m.set_seed(1);
  m.set_data_id("words");
  return m;
}

inline Status write_shards(FileSystem& fs, const std::string& folder,
                           const SaveId& id, const geometry::ParamTable& table,
                           const State& state, int ranks,
                           Compression compression = Compression::kNone) {
  for (int r = 0; r < ranks; ++r) {
    const auto [begin, end] = share(table.num_elements(), ranks, r);
    const auto shard = write_shard(fs, folder, id, r, table,
                                   pieces_of_range(table, begin, end),
                                   state.view(), {.compression = compression});
    if (!shard.ok()) return shard.status();
  }
  return ok_status();
}

inline Result<CommitResult> save(FileSystem& fs, const std::string& folder,
                                 const SaveId& id,
                                 const geometry::ParamTable& table,
                                 const State& state, int ranks,
                                 const Retention& retention = {},
                                 Compression compression = Compression::kNone,
                                 std::optional<manifest::Origin> origin = {}) {
  RETURN_IF_ERROR(
      write_shards(fs, folder, id, table, state, ranks, compression));
  return commit(fs, folder, manifest_of(table, id), ranks, table, retention,
                origin);
}

inline Status load_whole(FileSystem& fs, const std::string& path,
                         const geometry::ParamTable& table, State& state) {
  ASSIGN_OR_RETURN(const auto m, manifest::read_checkpoint(fs, path));
  state = State(table.num_elements());
  return load(fs, path, m, table,
              pieces_of_range(table, 0, table.num_elements()), state.view());
}

}  // namespace remesh::store
