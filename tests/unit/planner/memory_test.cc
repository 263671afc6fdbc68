// The planner's prediction of a rank's memory against what an engine of that
// mesh holds; ranks are threads.
#include "parallel/planner/memory.h"

#include <cmath>
#include <random>

#include "checkpoint/memory/replica_placement.h"
#include "parallel/geometry/batch.h"
#include "parallel/geometry/lora.h"
#include "parallel/geometry/sharding.h"
#include "tests/testing/engine.h"
#include "tests/testing/expect.h"
#include "tests/testing/llama.h"
#include "tests/testing/local_comm.h"
#include "tests/testing/seed.h"
#include "worker/engine/engine.h"

namespace remesh::planner {
namespace {

using geometry::Layout;
using geometry::ScheduleKind;
using Rng = std::mt19937_64;

// Allowed error of the total and of a category, and a negligible amount.
constexpr double kTotal = 0.02, kPart = 0.05;
constexpr uint64_t kSmall = 16 << 10;

JobShape random_shape(Rng& rng, bool bf16) {
  JobShape s;
  s.model = {.dim = 128,
             .n_layers = pick(rng, 4, 6),
             .n_heads = 8,
             .n_kv_heads = one_of(rng, {2, 4, 8}),
             .hidden_dim = 352,
             .vocab_size = 1000,
             .tie_embeddings = pick(rng, 0, 1) == 1};
  s.T = 64;
  s.B = pick(rng, 1, 2);
  s.microbatches = pick(rng, 2, 6);
  s.bf16 = bf16;
  s.zero_stage = pick(rng, 0, 3);
  s.schedule =
      one_of(rng, {ScheduleKind::kGpipe, ScheduleKind::k1F1B,
                   ScheduleKind::kInterleaved1F1B, ScheduleKind::kZbH1});
  if (s.schedule == ScheduleKind::kInterleaved1F1B) s.chunks = 2;
  s.recompute =
      one_of(rng, {geometry::Recompute::kNone, geometry::Recompute::kSelective,
                   geometry::Recompute::kFull});
  s.recompute_every = pick(rng, 1, 2);
  return s;
}

engine::EngineOptions options_of(const JobShape& s, const Layout& l) {
  return {
      .zero = {.stage = s.zero_stage,
               .shard_group = s.shard_group == 0 ? 0 : shard_group_on(s, l)},
      .schedule = schedule_kind_on(s, l),
      .chunks = chunks_on(s, l),
      .recompute = s.recompute,
      .recompute_every = s.recompute_every,
      .dtype = s.bf16 ? model::Dtype::kBf16 : model::Dtype::kFp32,
      .num_microbatches = s.microbatches,
      .max_batch = s.B,
      .max_seq = s.T};
}

// Makes one step on every rank and returns what each holds afterwards.
std::vector<MemoryUse> held(const JobShape& s, const Layout& l) {
  const auto table = geometry::ParamTable::make(s.model);
  std::vector<MemoryUse> out(static_cast<size_t>(l.world()));
  comm::on_ranks(l.world(), [&](comm::Comm& comm) {
    const auto backend = kernels::make_cpu_backend(1);
    ASSERT_OK_AND(auto mesh, comm::Mesh::make(comm, l));
    auto engine = engine::make_engine(table, *mesh, options_of(s, l), *backend,
                                      engine::Progress());
    ASSERT_OK(engine);
    engine::initialise(**engine, *backend, 1);
    (*engine)->state_loaded();
    const std::vector<int32_t> tokens(static_cast<size_t>(s.B * s.T), 3);
    const std::vector<model::MicroBatch> mine(
        static_cast<size_t>(
            geometry::even_share(s.microbatches, l.dp, mesh->coord().dp)
                .size()),
        {.tokens_BT = tokens.data(),
         .targets_BT = tokens.data(),
         .B = s.B,
         .T = s.T});
    ASSERT_OK((*engine)->run({.lr = 0.1,
                              .microbatches = mine,
                              .global_tokens = s.microbatches * s.B * s.T}));
    out[static_cast<size_t>(comm.rank())] = (*engine)->memory();
  });
  return out;
}

void near(const char* what, uint64_t predicted, uint64_t measured,
          double share) {
  const auto p = static_cast<double>(predicted);
  const auto m = static_cast<double>(measured);
  EXPECT_LE(std::abs(p - m), share * m + static_cast<double>(kSmall))
      << what << ": predicted " << predicted << ", held " << measured;
}

void compare(const JobShape& s, const Layout& l) {
  SCOPED_TRACE(testing::Message()
               << l.to_string() << " zero " << s.zero_stage << " "
               << geometry::schedule_name(s.schedule) << " chunks " << s.chunks
               << " recompute " << static_cast<int>(s.recompute) << " every "
               << s.recompute_every << " bf16 " << s.bf16 << " layers "
               << s.model.n_layers << " microbatches " << s.microbatches
               << " tied " << s.model.tie_embeddings);
  const std::vector<MemoryUse> all = held(s, l);
  for (int r = 0; r < l.world(); ++r) {
    SCOPED_TRACE("rank " + std::to_string(r));
    const MemoryUse& m = all[static_cast<size_t>(r)];
    const MemoryUse p = predict_memory(s, l, r);
    near("weights", p.weights, m.weights, kPart);
    near("gradients", p.gradients, m.gradients, kPart);
    near("optimizer", p.optimizer, m.optimizer, kPart);
    near("activations", p.activations, m.activations, kPart);
    near("buffers", p.buffers, m.buffers, kPart);
    near("total", p.total(),
         m.weights + m.gradients + m.optimizer + m.activations + m.buffers,
         kTotal);
  }
}

TEST(PredictMemory, IsWhatAnEngineHoldsOnAnyMesh) {
  const uint64_t seed = test_seed();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  Rng rng(seed);
  const auto backend = kernels::make_cpu_backend(1);
  const bool bf16 = backend->supports_bf16();
  const bool packed =
      bf16 &&
      backend->make_weight(model::Dtype::kBf16, 64, 64)->bytes() > 2 * 64 * 64;
  int compared = 0;
  while (compared < 16 && !testing::Test::HasFailure()) {
    JobShape s = random_shape(rng, bf16 && pick(rng, 0, 1) == 1);
    s.packed = packed;
    if (compared % 4 == 3)
      s.model.lora = {.rank = 8,
                      .alpha = 16,
                      .targets = pick(rng, 0, 1) == 1
                                     ? geometry::lora_targets()
                                     : std::vector<std::string>{"v_proj"}};
    const Layout l{.dp = pick(rng, 1, 3),
                   .pp = pick(rng, 1, 3),
                   .tp = pick(rng, 1, 2),
                   .cp = pick(rng, 1, 2)};
    if (l.world() > 6 || !admit(s, l).ok()) continue;
    compare(s, l);
    ++compared;
  }
}

TEST(PredictMemory, ShardingAndRecomputingLowerIt) {
  JobShape s{.model = geometry::llama(256, 8, 8, 8, 704, 4096),
             .T = 256,
             .B = 2,
             .microbatches = 4};
  const Layout l{.dp = 4};
  const MemoryUse plain = predict_worst_memory(s, l);
  s.zero_stage = 1;
  EXPECT_EQ(4 * predict_worst_memory(s, l).optimizer, plain.optimizer);
  s.zero_stage = 3;
  EXPECT_LT(predict_worst_memory(s, l).weights, plain.weights);
  s.recompute = geometry::Recompute::kSelective;
  const uint64_t selective = predict_worst_memory(s, l).activations;
  EXPECT_LT(selective, plain.activations);
  s.recompute = geometry::Recompute::kFull;
  EXPECT_LT(predict_worst_memory(s, l).activations, selective / 2);
}

// Of the flavor 42m.
TEST(PredictMemory, AdaptersHaveAHundredthOfTheOptimizersState) {
  JobShape s{.model = geometry::llama(512, 8, 8, 8, 1376, 32000),
             .T = 256,
             .B = 8,
             .microbatches = 1};
  const uint64_t all = predict_memory(s, {}, 0).optimizer;
  s.model.lora = {.rank = 8, .alpha = 16, .targets = {"q_proj", "v_proj"}};
  EXPECT_LE(400 * predict_memory(s, {}, 0).optimizer, all);
  s.model.lora = {.rank = 4, .alpha = 16, .targets = geometry::lora_targets()};
  EXPECT_LE(100 * predict_memory(s, {}, 0).optimizer, all);
}

TEST(PredictMemory, AKeptStateIsHeldTwiceAndItsReplicasToo) {
  JobShape s{.model = geometry::llama(256, 8, 8, 8, 704, 4096),
             .T = 256,
             .B = 2,
             .microbatches = 4};
  const Layout l{.tp = 2};
  const MemoryUse own = predict_memory(s, l, 0);
  s.keep_state = true;
  MemoryUse kept = predict_memory(s, l, 0);
  EXPECT_EQ(kept.weights, 2 * own.weights);
  EXPECT_EQ(kept.optimizer, 2 * own.optimizer);
  EXPECT_EQ(kept.buffers, own.buffers);
  s.replicas = 1;
  kept = predict_memory(s, l, 0);
  EXPECT_EQ(kept.buffers - own.buffers, kept.weights + kept.optimizer);
  s.replicate_every = 5;  // its own state of the last fifth step as well
  kept = predict_memory(s, l, 0);
  EXPECT_EQ(kept.buffers - own.buffers, 2 * (kept.weights + kept.optimizer));
}

// However many: nothing is done for each of them.
TEST(PredictMemory, OnlyGpipeHoldsAllMicrobatches) {
  const Layout l{.dp = 2, .pp = 4};
  for (const ScheduleKind kind :
       {ScheduleKind::kGpipe, ScheduleKind::k1F1B,
        ScheduleKind::kInterleaved1F1B, ScheduleKind::kZbH1}) {
    SCOPED_TRACE(geometry::schedule_name(kind));
    JobShape s{.model = geometry::llama(256, 8, 8, 8, 704, 4096), .T = 256};
    s.schedule = kind;
    s.chunks = kind == ScheduleKind::kInterleaved1F1B ? 2 : 1;
    const auto of = [&](int64_t microbatches) {
      s.microbatches = microbatches * l.dp;
      return predict_memory(s, l, 0);
    };
    const MemoryUse some = of(24);
    constexpr int64_t kTimes = 1'000'000'000;
    const MemoryUse many = of(24 * kTimes);
    EXPECT_EQ(many.buffers, some.buffers);
    EXPECT_EQ(many.activations,
              some.activations *
                  (kind == ScheduleKind::kGpipe ? uint64_t{kTimes} : 1));
  }
}

TEST(PredictMemory, TheRanksOfAMeshSaveEveryParameterOnce) {
  const uint64_t seed = test_seed();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  Rng rng(seed);
  for (int i = 0; i < 50; ++i) {
    JobShape s = random_shape(rng, /*bf16=*/false);
    const Layout l{
        .dp = pick(rng, 1, 3), .pp = pick(rng, 1, 2), .tp = pick(rng, 1, 2)};
    if (!admit(s, l).ok()) continue;
    uint64_t kept = 0, own = 0;
    for (int r = 0; r < l.world(); ++r) {
      s.keep_state = true;
      kept += predict_save(s, l, r);
      s.keep_state = false;
      own += predict_save(s, l, r);
    }
    const auto state = static_cast<uint64_t>(
        12 * geometry::ParamTable::make(s.model).num_elements());
    EXPECT_EQ(kept, state) << l.to_string() << " zero " << s.zero_stage;
    // Files are smaller than their buffers may be.
    EXPECT_EQ(own, 2 * state) << l.to_string() << " zero " << s.zero_stage;
  }
}

TEST(PredictMemory, SegmentsAreTheStateAndItsReplicas) {
  JobShape s{.model = geometry::llama(128, 4, 8, 8, 352, 1000),
             .T = 64,
             .microbatches = 4};
  const Layout l{.tp = 2};
  EXPECT_EQ(predict_segments(s, l, 0), 0U);
  s.keep_state = true;
  const MemoryUse own = predict_memory(s, l, 0);
  EXPECT_EQ(predict_segments(s, l, 0), own.weights + own.optimizer);
  s.replicas = 1;
  EXPECT_EQ(predict_segments(s, l, 0), 2 * (own.weights + own.optimizer));
}

// Eight sums at once, each of two blocks of at most 256 KiB from every rank or
// 2 MiB together; a small model does not fill them.
TEST(PredictMemory, SumsOfGradientsNeedScratch) {
  JobShape s{.model = geometry::llama(1024, 8, 8, 8, 2816, 32000), .T = 64};
  const auto sums = [&](const Layout& l) {
    return predict_workspace(s, l, 1) - predict_workspace(s, {}, 1);
  };
  constexpr uint64_t kMiB = 1 << 20;
  EXPECT_EQ(sums({.pp = 2, .tp = 2}), 0U);
  EXPECT_EQ(sums({.dp = 2}), 8 * kMiB);
  EXPECT_EQ(sums({.dp = 2, .cp = 2}), 16 * kMiB);
  EXPECT_EQ(sums({.dp = 64}), 32 * kMiB);
  EXPECT_EQ(sums({.dp = 256}), 64 * kMiB);
  s.zero_stage = 1;
  EXPECT_EQ(sums({.dp = 4}), 16 * kMiB);
  s.shard_group = 2;
  EXPECT_EQ(sums({.dp = 8}), 24 * kMiB);
  s.model = geometry::llama(64, 2, 4, 4, 128, 256);
  EXPECT_EQ(sums({.dp = 8, .pp = 2}),
            static_cast<uint64_t>(
                geometry::ParamTable::make(s.model).num_elements() / 2 * 8));
}

// On workers and hosts of their own.
TEST(PredictMemory, ReplicasAreThoseThatArePlaced) {
  const uint64_t seed = test_seed();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  Rng rng(seed);
  for (int i = 0; i < 300; ++i) {
    JobShape s;
    s.keep_state = true;
    s.replicas = pick(rng, 0, 3);
    s.zero_stage = pick(rng, 0, 3);
    s.shard_group = pick(rng, 0, 4);
    const Layout l{.dp = pick(rng, 1, 4),
                   .pp = pick(rng, 1, 3),
                   .tp = pick(rng, 1, 2),
                   .cp = pick(rng, 1, 2)};
    const int z = shard_group_on(s, l);
    const geometry::Sharding sharding{
        .layout = l,
        .zero = {.stage = s.zero_stage,
                 .shard_group = s.zero_stage == 0 ? 0 : z}};
    std::vector<memory::RankHost> places;
    std::vector<int> groups;
    for (int r = 0; r < l.world(); ++r) {
      places.push_back({std::to_string(r), std::to_string(r)});
      groups.push_back(geometry::replica_group(sharding, r));
    }
    size_t most = 0;
    for (const auto& k :
         memory::place_replicas(places, groups, s.replicas).kept)
      most = std::max(most, k.size());
    EXPECT_EQ(replicas_kept(s, l), static_cast<int64_t>(most))
        << l.to_string() << " zero " << s.zero_stage << " group " << z
        << " replicas " << s.replicas;
  }
}

}  // namespace
}  // namespace remesh::planner
