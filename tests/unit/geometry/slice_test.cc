#include "parallel/geometry/slice.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "parallel/geometry/batch.h"
#include "parallel/geometry/schedule.h"

namespace remesh::geometry {
namespace {

using Rng = std::mt19937_64;

int64_t pick(Rng& rng, int64_t from, int64_t to) {
  return std::uniform_int_distribution<int64_t>(from, to)(rng);
}

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
    const Layout l{.dp = static_cast<int>(pick(rng, 1, 2)),
                   .pp = static_cast<int>(pick(rng, 1, 5)),
                   .tp = static_cast<int>(pick(rng, 1, 4))};
    if (validate_layout(c, l).ok()) return l;
  }
}

bool contains(const Box& b, int64_t row, int64_t column) {
  return row >= b.start[0] && row < b.start[0] + b.count[0] &&
         (b.start.size() == 1 ||
          (column >= b.start[1] && column < b.start[1] + b.count[1]));
}

class Random : public testing::Test {
 protected:
  Random() { std::printf("seed %llu\n", (unsigned long long)seed_); }
  uint64_t seed_ = std::random_device()();
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
        const int64_t columns = t[i].shape.size() == 2 ? t[i].shape[1] : 1;
        int holders = 0;
        for (int pp = 0; pp < l.pp; ++pp)
          for (int tp = 0; tp < l.tp; ++tp) {
            if (on_stage(t[i], c.tie_embeddings, bounds, pp) &&
                contains(tp_box(t[i], l.tp, tp), e / columns, e % columns))
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

TEST_F(Slice, AShardKeepsHeadsWholeAndQueriesWithTheirKeys) {
  for (int trial = 0; trial < 60; ++trial) {
    const ModelConfig c = random_model(rng_);
    const ParamTable t = ParamTable::make(c);
    const Layout l = random_layout(rng_, c);
    for (int tp = 0; tp < l.tp; ++tp) {
      const auto q = tp_box(t[t.find(Role::kQuery, 0)], l.tp, tp);
      const auto k = tp_box(t[t.find(Role::kKey, 0)], l.tp, tp);
      const auto o = tp_box(t[t.find(Role::kOutput, 0)], l.tp, tp);
      const int64_t group = c.n_heads / c.n_kv_heads;
      // Every query head of the rank reads a key/value head of the rank.
      EXPECT_EQ(q.start[0] / c.head_dim() / group, k.start[0] / c.head_dim());
      EXPECT_EQ((q.start[0] + q.count[0] - 1) / c.head_dim() / group,
                (k.start[0] + k.count[0] - 1) / c.head_dim());
      EXPECT_EQ(q.start[0] % c.head_dim(), 0);
      EXPECT_EQ(o.start[1], q.start[0]);
      EXPECT_EQ(o.count[1], q.count[0]);
      EXPECT_GT(k.count[0], 0);
      EXPECT_GT(tp_box(t[0], l.tp, tp).numel(), 0);
    }
  }
}

TEST(SliceErrors, ALayoutThatDoesNotFitIsRefusedWithTheAllowedDegrees) {
  const ModelConfig c{.dim = 48,
                      .n_layers = 3,
                      .n_heads = 12,
                      .n_kv_heads = 6,
                      .hidden_dim = 64,
                      .vocab_size = 257};
  EXPECT_TRUE(validate_layout(c, {.pp = 3, .tp = 6}).ok());
  EXPECT_NE(validate_layout(c, {.tp = 4}).message().find("allowed: 1, 2, 3, 6"),
            std::string::npos);
  EXPECT_NE(validate_layout(c, {.pp = 4}).message().find("allowed: 1 to 3"),
            std::string::npos);
}

TEST_F(Slice, IntersectIsTheCommonElements) {
  for (int trial = 0; trial < 2000; ++trial) {
    const auto box = [&] {
      return Box{{pick(rng_, 0, 6), pick(rng_, 0, 6)},
                 {pick(rng_, 0, 5), pick(rng_, 0, 5)}};
    };
    const Box a = box();
    const Box b = box();
    const auto both = intersect(a, b);
    for (int64_t r = 0; r < 12; ++r)
      for (int64_t col = 0; col < 12; ++col)
        ASSERT_EQ(contains(a, r, col) && contains(b, r, col),
                  both && contains(*both, r, col));
    if (both) {
      EXPECT_FALSE(both->empty());
    }
  }
}

TEST_F(Slice, RunsVisitEveryElementOfTheInnerBoxInOrder) {
  for (int trial = 0; trial < 2000; ++trial) {
    const size_t dims = static_cast<size_t>(pick(rng_, 1, 3));
    Box outer, inner;
    bool row_rest_whole = true;
    for (size_t d = 0; d < dims; ++d) {
      outer.start.push_back(pick(rng_, 0, 3));
      outer.count.push_back(pick(rng_, 1, 4));
      const int64_t skip = pick(rng_, 0, outer.count[d] - 1);
      inner.start.push_back(outer.start[d] + skip);
      inner.count.push_back(pick(rng_, 0, outer.count[d] - skip));
      if (d > 0) row_rest_whole &= inner.count[d] == outer.count[d];
    }
    std::vector<std::pair<int64_t, int64_t>> got, want;
    int runs = 0;
    for_each_run(outer, inner, [&](int64_t o, int64_t i, int64_t n) {
      ++runs;
      for (int64_t k = 0; k < n; ++k) got.emplace_back(o + k, i + k);
    });
    for (int64_t e = 0; e < inner.numel(); ++e) {
      int64_t rest = e;
      int64_t offset = 0;
      int64_t stride = 1;
      for (size_t d = dims; d-- > 0;) {
        offset +=
            (inner.start[d] - outer.start[d] + rest % inner.count[d]) * stride;
        stride *= outer.count[d];
        rest /= inner.count[d];
      }
      want.emplace_back(offset, e);
    }
    ASSERT_EQ(got, want);
    if (row_rest_whole && !inner.empty()) {
      ASSERT_EQ(runs, 1);
    }
  }
}

TEST_F(Slice, EvenRangesPartitionAndBoxesCoverThemInOrder) {
  for (int trial = 0; trial < 60; ++trial) {
    const ParamTable t = ParamTable::make(random_model(rng_));
    const int parts = static_cast<int>(pick(rng_, 1, 40));
    int64_t at = 0;
    int64_t largest = 0, smallest = t.num_elements();
    for (const FlatRange& r : split_even(t.num_elements(), parts)) {
      EXPECT_EQ(r.begin, at);
      largest = std::max(largest, r.size());
      smallest = std::min(smallest, r.size());
      std::map<size_t, int> boxes;
      for (const Piece& p : boxes_of_range(t, r.begin, r.end)) {
        ASSERT_EQ(p.flat_begin, at);
        ASSERT_LE(++boxes[p.param], 3);
        // Its elements, in the order of the box, are the next ones.
        const Box all = whole(t[p.param]);
        int runs = 0;
        for_each_run(all, p.box, [&](int64_t o, int64_t, int64_t n) {
          ++runs;
          ASSERT_EQ(t.offset(p.param) + o, at);
          ASSERT_EQ(n, p.box.numel());
        });
        ASSERT_EQ(runs, 1);
        at += p.box.numel();
      }
      ASSERT_EQ(at, r.end);
    }
    EXPECT_EQ(at, t.num_elements());
    EXPECT_LE(largest - smallest, 1);
  }
}

TEST(Batch, SharesPartitionTheMicrobatchesForAnyNumberOfRanks) {
  for (int64_t m = 0; m <= 20; ++m)
    for (int dp = 1; dp <= 25; ++dp) {
      int64_t at = 0;
      int64_t previous = m + 1;
      for (int i = 0; i < dp; ++i) {
        const MicrobatchRange r = deal(m, dp, i);
        ASSERT_EQ(r.begin, at);
        ASSERT_TRUE(r.size() == m / dp || r.size() == m / dp + 1);
        ASSERT_LE(r.size(), previous);  // the first ranks have more
        for (int64_t b = r.begin; b < r.end; ++b)
          ASSERT_EQ(owner_of_microbatch(m, dp, b), i);
        previous = r.size();
        at = r.end;
      }
      ASSERT_EQ(at, m);
    }
}

}  // namespace
}  // namespace remesh::geometry
