#include "worker/train/digest.h"

#include <bit>

#include "parallel/geometry/sharding.h"
#include "proto/base/check.h"

namespace remesh::train {
namespace {

// Odd, otherwise arbitrary (fractions of square roots and the golden ratio).
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;
constexpr uint64_t kFirstMoment = 0xbb67ae8584caa73bULL;
constexpr uint64_t kSecondMoment = 0x3c6ef372fe94f82bULL;
// Makes an element count even if it is zero.
constexpr uint64_t kPresent = 0xa54ff53a5f1d36f1ULL;

// The finalizer of SplitMix64 (Steele, Lea and Flood 2014).
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

uint64_t bits(float f) { return std::bit_cast<uint32_t>(f); }

// The digest of `n` consecutive elements of a parameter, from element `e` on.
uint64_t digest_run(uint64_t seed, int64_t e, int64_t n, const float* w,
                    const float* m, const float* v) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t key = mix(seed + static_cast<uint64_t>(e + i) * kGolden) | 1;
    sum += key * (bits(w[i]) + kFirstMoment * bits(m[i]) +
                  kSecondMoment * bits(v[i]) + kPresent);
  }
  return sum;
}

}  // namespace

uint64_t state_digest(const geometry::RankShard& rank,
                      const geometry::ConstStateView& state) {
  const geometry::ParamTable& table = rank.shard.table();
  const auto n = static_cast<size_t>(rank.zero.state_elements());
  for (size_t v = 0; v < geometry::kNumStateVectors; ++v)
    CHECK(state[v].size() == n);
  uint64_t sum = 0;
  for (const geometry::Piece& p : pieces_to_save(rank)) {
    const uint64_t seed = mix(static_cast<uint64_t>(p.param) + 1);
    const int64_t width = table[p.param].shape.back();
    for (int64_t r = 0; r < p.rect.rows; ++r) {
      const auto at = static_cast<size_t>(p.at + r * p.row_stride);
      sum += digest_run(seed, (p.rect.row + r) * width + p.rect.col,
                        p.rect.cols, &state.weights[at], &state.exp_avg[at],
                        &state.exp_avg_sq[at]);
    }
  }
  return sum;
}

std::array<int64_t, 2> to_halves(uint64_t part) {
  return {static_cast<int64_t>(part & 0xffffffffULL),
          static_cast<int64_t>(part >> 32)};
}

uint64_t from_halves(const std::array<int64_t, 2>& sums) {
  return static_cast<uint64_t>(sums[0]) +
         (static_cast<uint64_t>(sums[1]) << 32);
}

}  // namespace remesh::train
