#include "worker/train/digest.h"

#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <random>
#include <set>

#include "tests/testing/expect.h"
#include "tests/testing/llama.h"
#include "tests/testing/seed.h"
#include "tests/unit/exchange/states.h"

namespace remesh::train {
namespace {

using exchange::State;
using geometry::ParamTable;
using geometry::RankShard;
using geometry::Sharding;

uint64_t part(const RankShard& r, const State& s) {
  return state_digest(r, s.view());
}

// Over all ranks, whose states are generated with `salt`.
uint64_t digest_on(const ParamTable& table, const Sharding& s, uint64_t salt) {
  uint64_t sum = 0;
  for (int rank = 0; rank < s.layout.world(); ++rank) {
    const auto r = make_rank_shard(table, s, rank);
    CHECK(r.ok());
    sum += part(*r, exchange::state_of(table, s, rank, salt));
  }
  return sum;
}

TEST(Digest, IsTheSameOnAnyMesh) {
  std::mt19937 random(test_seed());
  for (int k = 0; k < 300; ++k) {
    const ParamTable table = ParamTable::make(geometry::random_config(random));
    const uint64_t salt = random();
    const Sharding a = geometry::random_sharding(random, table.config(), 8);
    const Sharding b = geometry::random_sharding(random, table.config(), 8);
    const uint64_t digest = digest_on(table, a, salt);
    ASSERT_EQ(digest, digest_on(table, b, salt))
        << k << ": " << a.layout.to_string() << " and " << b.layout.to_string();
    ASSERT_NE(digest, digest_on(table, b, salt + 1)) << k;
  }
}

TEST(Digest, AnyBitOfACountedElementCounts) {
  std::mt19937 random(test_seed());
  const ParamTable table = ParamTable::make(geometry::random_config(random));
  const Sharding one{.layout = {}, .bounds = {0, table.config().n_layers}};
  ASSERT_OK_AND(const auto r, make_rank_shard(table, one, 0));
  State s = exchange::state_of(table, one, 0, 7);
  const uint64_t before = part(r, s);
  for (int k = 0; k < 1000; ++k) {
    std::vector<float>& v = s.v[random() % geometry::kNumStateVectors];
    float& element = v[random() % v.size()];
    const float old = element;
    uint32_t b = 0;
    std::memcpy(&b, &old, sizeof(b));
    b ^= 1U << random() % 32;
    std::memcpy(&element, &b, sizeof(b));
    ASSERT_NE(part(r, s), before);
    element = old;
  }
  EXPECT_EQ(part(r, s), before);
}

TEST(Digest, DistinguishesPlacesAndVectors) {
  const ParamTable table =
      ParamTable::make(geometry::llama(8, 2, 2, 2, 16, 17));
  const Sharding one{.layout = {}, .bounds = {0, 2}};
  ASSERT_OK_AND(const auto r, make_rank_shard(table, one, 0));
  State s(r.zero.state_elements());
  for (auto& v : s.v) v.assign(v.size(), 0.0F);
  const uint64_t zeros = part(r, s);
  EXPECT_NE(zeros, 0U);
  std::set<uint64_t> seen = {zeros};
  for (auto& v : s.v)
    for (float& x : v) {
      x = 1.0F;
      EXPECT_TRUE(seen.insert(part(r, s)).second);
      x = 0.0F;
    }
}

TEST(Digest, HalvesAddUpToTheWrappingSum) {
  std::mt19937_64 random(1);
  for (int k = 0; k < 100; ++k) {
    uint64_t sum = 0;
    std::array<int64_t, 2> halves = {0, 0};
    for (int rank = 0; rank < 1000; ++rank) {
      const uint64_t x = random();
      sum += x;
      const auto h = to_halves(x);
      for (size_t i = 0; i < h.size(); ++i) halves[i] += h[i];
    }
    ASSERT_EQ(from_halves(halves), sum);
  }
}

// Prints the cost of train.digest per step; there is no limit.
TEST(Digest, IsQuick) {
  const ParamTable table =
      ParamTable::make(geometry::llama(256, 4, 4, 4, 704, 1024));
  const Sharding one{.layout = {}, .bounds = {0, 4}};
  ASSERT_OK_AND(const auto r, make_rank_shard(table, one, 0));
  const State s(r.zero.state_elements());
  double best = 1e9;
  uint64_t sum = 0;
  for (int k = 0; k < 3; ++k) {
    const auto t = std::chrono::steady_clock::now();
    sum += part(r, s);
    best = std::min(best, std::chrono::duration<double>(
                              std::chrono::steady_clock::now() - t)
                              .count());
  }
  const double bytes = 12.0 * static_cast<double>(r.zero.state_elements());
  RecordProperty("gb_per_s", fmt::format("{:.2f}", bytes / best / 1e9));
  fmt::print("{:.2f} GB/s ({})\n", bytes / best / 1e9, sum);
}

}  // namespace
}  // namespace remesh::train
