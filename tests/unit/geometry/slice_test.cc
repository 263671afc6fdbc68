#include "parallel/geometry/slice.h"

#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "parallel/geometry/batch.h"
#include "parallel/geometry/schedule.h"
#include "tests/testing/expect.h"
#include "tests/testing/llama.h"
#include "tests/testing/pieces.h"
#include "tests/testing/seed.h"

namespace remesh::geometry {
namespace {

using Rng = std::mt19937_64;

ModelConfig random_model(Rng& rng) {
  ModelConfig c;
  c.n_kv_heads = int64_t{1} << pick(rng, 0, 2);
  if (pick(rng, 0, 3) == 0) c.n_kv_heads = 3;
  c.n_heads = c.n_kv_heads * pick(rng, 1, 2);
  c.dim = c.n_heads * 2 * pick(rng, 1, 2);
  c.n_layers = pick(rng, 1, 5);
  c.hidden_dim = pick(rng, 4, 20);
  c.vocab_size = pick(rng, 4, 17);
  c.tie_embeddings = pick(rng, 0, 1) == 1;
  CHECK(c.validate().ok());
  return c;
}

Layout random_layout(Rng& rng, const ModelConfig& c) {
  while (true) {
    const Layout l{
        .dp = pick(rng, 1, 2), .pp = pick(rng, 1, 5), .tp = pick(rng, 1, 4)};
    if (validate_layout(c, l).ok()) return l;
  }
}

bool contains(const Rect& r, int64_t row, int64_t column) {
  return row >= r.row && row < r.row + r.rows && column >= r.col &&
         column < r.col + r.cols;
}

class Random : public testing::Test {
 protected:
  Random() { std::printf("seed %llu\n", (unsigned long long)seed_); }
  uint64_t seed_ = test_seed();
  Rng rng_{seed_};
};

using Slice = Random;

TEST_F(Slice, ShardsOfOneReplicaCoverEveryElementOnce) {
  for (int trial = 0; trial < 60; ++trial) {
    const ModelConfig c = random_model(rng_);
    const ParamTable t = ParamTable::make(c);
    const Layout l = random_layout(rng_, c);
    const auto bounds = *split_layers(c.n_layers, l.pp);
    for (size_t i = 0; i < t.size(); ++i) {
      const bool ends =
          t[i].role == Role::kEmbedding && c.tie_embeddings && l.pp > 1;
      for (int64_t e = 0; e < t[i].numel(); ++e) {
        const int64_t columns = t[i].shape.back();
        int holders = 0;
        for (int pp = 0; pp < l.pp; ++pp)
          for (int tp = 0; tp < l.tp; ++tp) {
            if (on_stage(t[i], c.tie_embeddings, bounds, pp) &&
                contains(tp_rect(t[i], l.tp, tp), e / columns, e % columns))
              ++holders;
          }
        const bool kv = t[i].role == Role::kKey || t[i].role == Role::kValue;
        const int sharing =
            std::max<int>(1, l.tp / static_cast<int>(c.n_kv_heads));
        const int copies = t[i].split == TensorSplit::kNone ? l.tp
                           : kv                             ? sharing
                                                            : 1;
        ASSERT_EQ(holders, copies * (ends ? 2 : 1))
            << t[i].name << " element " << e << " " << l.to_string();
      }
    }
  }
}

TEST_F(Slice, AShardHasCompleteHeadsAndTheKeysOfItsQueries) {
  for (int trial = 0; trial < 60; ++trial) {
    const ModelConfig c = random_model(rng_);
    const ParamTable t = ParamTable::make(c);
    const Layout l = random_layout(rng_, c);
    for (int tp = 0; tp < l.tp; ++tp) {
      const auto q = tp_rect(t[t.find(Role::kQuery, 0)], l.tp, tp);
      const auto k = tp_rect(t[t.find(Role::kKey, 0)], l.tp, tp);
      const auto o = tp_rect(t[t.find(Role::kOutput, 0)], l.tp, tp);
      const int64_t group = c.n_heads / c.n_kv_heads;
      // Every query head of the rank reads a key/value head of the rank.
      EXPECT_EQ(q.row / c.head_dim() / group, k.row / c.head_dim());
      EXPECT_EQ((q.row + q.rows - 1) / c.head_dim() / group,
                (k.row + k.rows - 1) / c.head_dim());
      EXPECT_EQ(q.row % c.head_dim(), 0);
      EXPECT_EQ(o.col, q.row);
      EXPECT_EQ(o.cols, q.rows);
      EXPECT_GT(k.rows, 0);
      EXPECT_GT(tp_rect(t[0], l.tp, tp).numel(), 0);
    }
  }
}

TEST(SliceErrors, ALayoutThatDoesNotFitIsRefusedWithTheAllowedDegrees) {
  const ModelConfig c = llama(48, 3, 12, 6, 64, 257);
  EXPECT_OK(validate_layout(c, {.pp = 3, .tp = 6}));
  EXPECT_SAYS(validate_layout(c, {.tp = 4}), "allowed: 1, 2, 3, 6");
  EXPECT_SAYS(validate_layout(c, {.pp = 4}), "allowed: 1 to 3");
}

Rect random_rect(Rng& rng) {
  return {pick(rng, 0, 6), pick(rng, 0, 6), pick(rng, 0, 5), pick(rng, 0, 5)};
}

TEST_F(Slice, IntersectIsTheCommonElements) {
  for (int trial = 0; trial < 2000; ++trial) {
    const Rect a = random_rect(rng_);
    const Rect b = random_rect(rng_);
    const Rect both = intersect(a, b);
    for (int64_t r = 0; r < 12; ++r)
      for (int64_t col = 0; col < 12; ++col)
        ASSERT_EQ(contains(a, r, col) && contains(b, r, col),
                  contains(both, r, col));
  }
}

// Twin: a set of elements.
TEST_F(Slice, CoveringVisitsEveryElementOnceUntilNoneIsLeft) {
  int covered_all = 0;
  for (int trial = 0; trial < 500; ++trial) {
    const Rect all = random_rect(rng_);
    std::set<std::pair<int64_t, int64_t>> left;
    const auto for_each = [](const Rect& r, const auto& f) {
      for (int64_t row = r.row; row < r.row + r.rows; ++row)
        for (int64_t col = r.col; col < r.col + r.cols; ++col) f(row, col);
    };
    for_each(all, [&](int64_t r, int64_t c) { left.emplace(r, c); });
    Uncovered uncovered(all);
    for (int i = 0; i < 12; ++i) {
      const Rect by = random_rect(rng_);
      std::set<std::pair<int64_t, int64_t>> want, got;
      for (const auto& [r, c] : left)
        if (contains(by, r, c)) want.emplace(r, c);
      uncovered.cover(by, [&](const Rect& part) {
        for_each(part, [&](int64_t r, int64_t c) {
          ASSERT_TRUE(got.emplace(r, c).second);
        });
      });
      ASSERT_EQ(got, want);
      for (const auto& e : want) left.erase(e);
      ASSERT_EQ(uncovered.empty(), left.empty());
      if (left.empty()) break;
      ASSERT_TRUE(
          left.contains({uncovered.first().row, uncovered.first().col}));
    }
    covered_all += left.empty() ? 1 : 0;
  }
  EXPECT_GT(covered_all, 50);
}

TEST_F(Slice, PiecesOfRangesCoverThemInOrder) {
  for (int trial = 0; trial < 60; ++trial) {
    const ParamTable t = ParamTable::make(random_model(rng_));
    const int parts = pick(rng_, 1, 40);
    int64_t next = 0;
    for (int i = 0; i < parts; ++i) {
      const MicrobatchRange r = even_share(t.num_elements(), parts, i);
      const std::vector<Piece> pieces = pieces_of_range(t, r.begin, r.end);
      std::map<size_t, int> per_param;
      for (const Piece& p : pieces) ASSERT_LE(++per_param[p.param], 3);
      for_each_element(t, pieces, [&](int64_t at, size_t param, int64_t e) {
        ASSERT_EQ(at, next);
        ASSERT_EQ(t.offset(param) + e, next);
        ++next;
      });
      ASSERT_EQ(next, r.end);
    }
    EXPECT_EQ(next, t.num_elements());
  }
}

TEST(Batch, SharesPartitionTheMicrobatchesForAnyNumberOfRanks) {
  for (int64_t m = 0; m <= 20; ++m)
    for (int dp = 1; dp <= 25; ++dp) {
      int64_t at = 0;
      int64_t previous = m + 1;
      for (int i = 0; i < dp; ++i) {
        const MicrobatchRange r = even_share(m, dp, i);
        ASSERT_EQ(r.begin, at);
        ASSERT_TRUE(r.size() == m / dp || r.size() == m / dp + 1);
        ASSERT_LE(r.size(), previous);  // the first ranks have more
        previous = r.size();
        at = r.end;
      }
      ASSERT_EQ(at, m);
    }
}

// Against every way to divide them.
TEST(Batch, SharesBySpeedAreTheFastest) {
  std::mt19937_64 rng(7);
  for (int trial = 0; trial < 200; ++trial) {
    const auto n = std::uniform_int_distribution<int64_t>(3, 14)(rng);
    std::vector<double> speeds;
    for (int i = 0; i < 3; ++i)
      speeds.push_back(std::uniform_real_distribution<double>(0.2, 3)(rng));
    double fastest = 1e9;
    for (int64_t a = 1; a < n; ++a)
      for (int64_t b = 1; a + b < n; ++b)
        fastest =
            std::min(fastest, slowest_share(n, {a, b, n - a - b}, speeds));
    const double even = slowest_share(n, {}, speeds);
    const Shares shares = shares_by_speed(n, speeds);
    if (shares.empty()) {
      EXPECT_GT(fastest, 0.949 * even);
      continue;
    }
    EXPECT_DOUBLE_EQ(slowest_share(n, shares, speeds), fastest);
    EXPECT_LE(fastest, 0.95 * even);
    int64_t at = 0;
    for (int i = 0; i < 3; ++i) {
      const MicrobatchRange r = share_of(n, shares, 3, i);
      EXPECT_EQ(r.begin, at);
      EXPECT_GE(r.size(), 1);
      EXPECT_LE(r.size(), largest_share(n, shares, 3));
      at = r.end;
    }
    EXPECT_EQ(at, n);
  }
}

// One by one, to the first of the ranks that are ready first.
Shares naive_shares(int64_t n, const std::vector<double>& speeds) {
  Shares shares(speeds.size(), 1);
  for (auto left = n - static_cast<int64_t>(shares.size()); left > 0; --left) {
    const auto ready = [&](size_t i) {
      return static_cast<double>(shares[i] + 1) / speeds[i];
    };
    size_t first = 0;
    for (size_t i = 1; i < shares.size(); ++i)
      if (ready(i) < ready(first)) first = i;
    ++shares[first];
  }
  const bool faster =
      slowest_share(n, shares, speeds) <= 0.95 * slowest_share(n, {}, speeds);
  return faster ? shares : Shares{};
}

TEST(Batch, SharesBySpeedAreThoseDealtOneByOne) {
  for (const uint32_t seed : test_seeds(300)) {
    Rng rng(seed);
    const int64_t ranks = pick(rng, 1, 12);
    const int64_t n = pick(rng, ranks, int64_t{300});
    std::vector<double> speeds;
    for (int64_t i = 0; i < ranks; ++i)
      speeds.push_back(seed % 2 == 0 ? static_cast<double>(pick(rng, 1, 4))
                                     : std::exp2(pick(rng, -600, 600) / 60.0));
    ASSERT_EQ(shares_by_speed(n, speeds), naive_shares(n, speeds)) << seed;
  }
}

TEST(Batch, ALargeBatchIsDividedByTheSpeedsOfManyRanks) {
  constexpr int64_t kMicrobatches = 1 << 20;
  Rng rng(11);
  std::vector<double> speeds(1024);
  for (double& v : speeds)
    v = std::uniform_real_distribution<double>(0.5, 2)(rng);
  const Shares shares = shares_by_speed(kMicrobatches, speeds);
  ASSERT_EQ(shares.size(), speeds.size());
  EXPECT_EQ(std::accumulate(shares.begin(), shares.end(), int64_t{0}),
            kMicrobatches);
  // The slowest would be no faster with one less.
  double next = 1e9;
  for (size_t i = 0; i < shares.size(); ++i)
    next = std::min(next, static_cast<double>(shares[i] + 1) / speeds[i]);
  EXPECT_LE(slowest_share(kMicrobatches, shares, speeds), next);
}

TEST(Batch, AboutEqualSpeedsGetEvenShares) {
  EXPECT_EQ(shares_by_speed(64, {1, 1.03, 0.98, 1}), Shares{});
  EXPECT_EQ(shares_by_speed(2, {1, 5}), Shares{}) << "one is the least";
  EXPECT_EQ(shares_by_speed(6, {2, 1}), (Shares{4, 2}));
}

}  // namespace
}  // namespace remesh::geometry
