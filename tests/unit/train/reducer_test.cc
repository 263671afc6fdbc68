#include "worker/train/reducer.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <thread>

#include "parallel/comm/local_comm.h"
#include "worker/train/share.h"

namespace remesh::train {
namespace {

geometry::ParamTable tiny_table() {
  return geometry::ParamTable::llama({.dim = 8,
                                      .n_layers = 2,
                                      .n_heads = 2,
                                      .n_kv_heads = 1,
                                      .hidden_dim = 20,
                                      .vocab_size = 33});
}

float value(int rank, int64_t e, int round) {
  return static_cast<float>((e * 7 + rank * 13 + round * 5) % 101) - 50;
}

// Ranks finish their parameters in different orders, one has nothing to do:
// every element is the sum over the ranks all the same, twice in a row.
TEST(GradReducer, SumsEverythingWhateverTheOrderAndBucketSize) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  const geometry::ParamTable table = tiny_table();
  const int64_t n = table.num_elements();
  for (const int64_t bucket : {int64_t{1000}, int64_t{97}, n, n + 5}) {
    auto comms = comm::make_local_comms(3);
    std::vector<std::vector<float>> grads(3);
    std::vector<int> ticks(3, 0);
    std::vector<std::thread> ranks;
    for (int r = 0; r < 3; ++r)
      ranks.emplace_back([&, r] {
        GradReducer reducer(table, bucket, *comms[static_cast<size_t>(r)]);
        EXPECT_EQ(reducer.num_buckets(), (n + bucket - 1) / bucket);
        std::mt19937 rng(seed + static_cast<unsigned>(r));
        for (int round = 0; round < 2; ++round) {
          auto& g = grads[static_cast<size_t>(r)];
          g.resize(static_cast<size_t>(n));
          for (int64_t e = 0; e < n; ++e)
            g[static_cast<size_t>(e)] = value(r, e, round);
          reducer.begin(g);
          std::vector<size_t> order(table.size());
          std::iota(order.begin(), order.end(), size_t{0});
          std::shuffle(order.begin(), order.end(), rng);
          if (r == 1) order.clear();
          for (const size_t i : order) reducer.ready(i);
          reducer.all_ready();
          reducer.finish([&] { ++ticks[static_cast<size_t>(r)]; });
        }
      });
    for (std::thread& t : ranks) t.join();
    for (const auto& g : grads)
      for (int64_t e = 0; e < n; ++e)
        ASSERT_EQ(g[static_cast<size_t>(e)],
                  value(0, e, 1) + value(1, e, 1) + value(2, e, 1))
            << e << " bucket " << bucket;
  }
}

TEST(GradReducer, AloneLeavesGradientsAsTheyAre) {
  const geometry::ParamTable table = tiny_table();
  auto comms = comm::make_local_comms(1);
  GradReducer reducer(table, 64, *comms[0]);
  std::vector<float> g(static_cast<size_t>(table.num_elements()), 3.0F);
  reducer.begin(g);
  reducer.all_ready();
  reducer.finish([] {});
  for (const float x : g) ASSERT_EQ(x, 3.0F);
}

TEST(Share, PartsTileTheVector) {
  for (const int64_t n : {0, 1, 15, 16, 17, 1000, 4097})
    for (int parts = 1; parts < 9; ++parts) {
      int64_t at = 0;
      for (int i = 0; i < parts; ++i) {
        const Share s = share_of(n, parts, i);
        EXPECT_EQ(s.begin, at);
        EXPECT_TRUE(s.size() == share_length(n, parts) || s.end == n);
        at = s.end;
      }
      EXPECT_EQ(at, n);
      EXPECT_GE(share_length(n, parts) * parts, n);
    }
}

}  // namespace
}  // namespace remesh::train
