// A stage allocates what geometry::chunk_memory() predicts.
#include <fmt/format.h>

#include <array>
#include <random>

#include "tests/testing/expect.h"
#include "tests/testing/llama.h"
#include "tests/testing/local_comm.h"
#include "tests/testing/seed.h"
#include "tests/unit/model/model_fixture.h"

namespace remesh::model {
namespace {

struct Case {
  geometry::ModelConfig config;
  geometry::Layout layout;
  geometry::Coord coord;
  int chunks = 1;
  StageOptions options;
};

Case random_case(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](std::initializer_list<int> from) {
    return from.begin()[random() % from.size()];
  };
  Case c;
  c.layout = {
      .pp = pick({1, 1, 2, 3}), .tp = pick({1, 2, 4}), .cp = pick({1, 2, 3})};
  const auto below = [&](int n) {
    return static_cast<int>(random() % static_cast<uint64_t>(n));
  };
  c.coord = {.pp = below(c.layout.pp),
             .tp = below(c.layout.tp),
             .cp = below(c.layout.cp)};
  c.chunks = c.layout.pp > 1 ? pick({1, 2}) : 1;
  c.config = {.dim = 48,
              .n_layers = c.layout.pp * c.chunks + pick({0, 1, 4}),
              .n_heads = 8,
              .n_kv_heads = pick({1, 2, 8}),
              .hidden_dim = pick({13, 52}),
              .vocab_size = pick({61, 9001}),
              .tie_embeddings = random() % 2 == 0,
              .arch = std::array{"llama", "qwen2", "qwen3"}[random() % 3],
              .head_size = pick({0, 4})};
  c.options = {.chunk = below(c.chunks),
               .dtype = random() % 2 == 0 ? Dtype::kBf16 : Dtype::kFp32,
               .max_batch = pick({1, 3}),
               .max_seq = 12 * pick({1, 2, 3}),
               .num_slots = pick({1, 2, 5}),
               .split_backward = random() % 2 == 0,
               .block_buffers = pick({0, 2, 3})};
  return c;
}

geometry::ChunkMemory predicted(const geometry::ShardTable& shard,
                                const StageOptions& o, Dtype dtype,
                                bool packed) {
  return geometry::chunk_memory(shard, o.chunk,
                                {.max_batch = o.max_batch,
                                 .max_seq = o.max_seq,
                                 .bf16 = dtype == Dtype::kBf16,
                                 .packed = packed,
                                 .split_backward = o.split_backward,
                                 .recompute = o.recompute,
                                 .block_buffers = o.block_buffers});
}

TEST(Memory, IsPredictedExactly) {
  const uint64_t seed = test_seed();
  fmt::print("seed {}\n", seed);
  const auto backend = kernels::make_cpu_backend(1);
  const bool packed =
      backend->supports_bf16() &&
      backend->make_weight(Dtype::kBf16, 32, 32)->bytes() > 2 * 32 * 32;
  for (uint64_t i = seed; i < seed + 60; ++i) {
    Case c = random_case(i);
    SCOPED_TRACE(fmt::format("seed {}: {}", i, c.layout.to_string()));
    if (!backend->supports_bf16()) c.options.dtype = Dtype::kFp32;
    const auto table = geometry::ParamTable::make(c.config);
    const auto shard = make_shard(table, c.layout, c.coord, c.chunks);
    std::mt19937_64 random(i);
    for (int64_t l = shard.first_layer(c.options.chunk);
         l < shard.last_layer(c.options.chunk); ++l)
      c.options.recompute.push_back(static_cast<Recompute>(random() % 3));
    const geometry::ChunkMemory expected =
        predicted(shard, c.options, c.options.dtype, packed);
    const auto tp = comm::make_local_comms(c.layout.tp);
    const auto cp = comm::make_local_comms(c.layout.cp);
    c.options.tp = tp[static_cast<size_t>(c.coord.tp)].get();
    c.options.cp = cp[static_cast<size_t>(c.coord.cp)].get();
    ASSERT_OK_AND(const auto stage, Stage::create(shard, c.options, *backend));
    const Stage::Memory m = stage->memory();
    EXPECT_EQ(expected.weights, m.weights);
    EXPECT_EQ(expected.activations * static_cast<uint64_t>(c.options.num_slots),
              m.activations);
    EXPECT_EQ(expected.buffers, m.buffers);
  }
}

// The formulas of llama.h, for a stage in the middle.
TEST(Memory, ActivationsAreWhatTheHeaderSays) {
  const geometry::ModelConfig config = geometry::llama(64, 3, 8, 2, 80, 100);
  const auto table = geometry::ParamTable::make(config);
  const auto shard = make_shard(table, {.pp = 3, .tp = 2, .cp = 2},
                                {.pp = 1, .tp = 1, .cp = 1});
  StageOptions o{.max_batch = 3, .max_seq = 20};
  const uint64_t N = 30, n = 15, P = 30, D = 64, F = 40, q = 32, kv = 8;
  for (const uint64_t d : {uint64_t{2}, uint64_t{4}})
    for (const bool split : {false, true})
      for (const Recompute r :
           {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
        o.recompute = {r};
        o.split_backward = split;
        uint64_t bytes = 8 * n * D + 8 * n + 2 * d * P * D +
                         d * N * (2 * q + 2 * kv + 2 * F) + 4 * N * 4;
        if (r == Recompute::kSelective && !split)
          bytes -= d * N * (q + 2 * F) + 4 * N * 4;
        if (r == Recompute::kFull) bytes = 4 * n * D;
        if (split && r != Recompute::kFull)
          bytes += d * N * (F + q + 2 * kv) + 2 * d * P * D + 8 * D;
        if (split && r == Recompute::kFull)
          bytes = 4 * n * D + 4 * d * P * D + d * N * (2 * q + 2 * kv + 3 * F) +
                  8 * D;
        bytes += 4 * n * D;
        const Dtype type = d == 2 ? Dtype::kBf16 : Dtype::kFp32;
        EXPECT_EQ(predicted(shard, o, type, true).activations, bytes)
            << "d " << d << (split ? " split " : " whole ")
            << static_cast<int>(r);
      }
}

TEST(Memory, RecomputationSavesActivations) {
  const Model m(geometry::llama(64, 4, 8, 8, 172, 300), 1, 1);
  const auto shard = make_shard(m.table);
  StageOptions o{.max_batch = 4, .max_seq = 64};
  double none = 0;
  for (const Recompute r :
       {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
    o.recompute.assign(4, r);
    const geometry::ChunkMemory one = predicted(shard, o, Dtype::kBf16, true);
    if (r == Recompute::kNone) none = static_cast<double>(one.activations);
    const double share = r == Recompute::kNone        ? 1
                         : r == Recompute::kSelective ? 0.75
                                                      : 0.25;
    EXPECT_LE(static_cast<double>(one.activations), share * none);
  }
}

}  // namespace
}  // namespace remesh::model
