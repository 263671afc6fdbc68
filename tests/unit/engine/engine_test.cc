// Property tests of the engine: training is the same on any mesh.
//
// tests/testing/seed.h says how to choose the cases;
// REMESH_ENGINE_VERBOSE=1: prints each case before it runs.
#include "worker/engine/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "parallel/geometry/lora.h"
#include "tests/testing/engine.h"
#include "tests/testing/expect.h"
#include "tests/testing/llama.h"
#include "tests/testing/local_comm.h"
#include "tests/testing/seed.h"
#include "tests/unit/engine/engine_fixture.h"

namespace remesh::engine {
namespace {

// A hang is found by its last line.
void note(const Case& c) {
  if (std::getenv("REMESH_ENGINE_VERBOSE") != nullptr)
    fmt::print(stderr, "{}\n", c.to_string());
}

void expect_like_reference(const Case& c, double loss_bound, double bound) {
  SCOPED_TRACE(c.to_string());
  note(c);
  const Outcome want = run_case(reference_of(c));
  const Outcome got = run_case(c);
  ASSERT_OK(want.status);
  ASSERT_OK(got.status);
  EXPECT_EQ(got.inconsistent, "");
  for (size_t s = 0; s < want.loss.size(); ++s) {
    EXPECT_NEAR(got.loss[s] / want.loss[s], 1, loss_bound) << "step " << s;
    EXPECT_NEAR(got.norm[s] / want.norm[s], 1, bound) << "step " << s;
  }
  EXPECT_NEAR(got.evaluated / want.evaluated, 1, loss_bound);
  const Difference d =
      largest_difference(c.model, got.first_grad, want.first_grad);
  EXPECT_LE(d.value, bound) << d.param;
}

TEST(Engine, AnyMeshGivesTheReferencesLossAndGradients) {
  for (const uint32_t seed : test_seeds(40))
    if (!HasFailure()) expect_like_reference(random_case(seed, 8), 1e-5, 1e-4);
}

TEST(Engine, AnyMeshGivesTheReferencesLossAndGradientsInBf16) {
  if (!kernels::make_cpu_backend(1)->supports_bf16())
    GTEST_SKIP() << "needs bf16";
  for (const uint32_t seed : test_seeds(15)) {
    if (HasFailure()) break;
    Case c = random_case(seed, 8);
    c.options.dtype = model::Dtype::kBf16;
    expect_like_reference(c, 2e-2, 2e-2);
  }
}

TEST(Engine, AdaptersOnAnyMeshGiveTheReferencesLossAndGradients) {
  for (const uint32_t seed : test_seeds(15)) {
    if (HasFailure()) break;
    Case c = random_case(seed, 8);
    c.model.lora = {.rank = 3, .alpha = 12, .targets = {"v_proj", "o_proj"}};
    if (seed % 2 == 0) c.model.lora.targets = geometry::lora_targets();
    c.lr = 0.01;
    expect_like_reference(c, 1e-5, 1e-4);
  }
}

// A rank whose passes take minutes is not hung: each layer is progress, in
// forward, backward and, if it is apart, the pass of the weights' gradients.
TEST(Engine, ReportsProgressAtEveryLayerOfAPass) {
  constexpr int kLayers = 6;
  const auto table = geometry::ParamTable::make({.dim = 16,
                                                 .n_layers = kLayers,
                                                 .n_heads = 4,
                                                 .n_kv_heads = 2,
                                                 .hidden_dim = 40,
                                                 .vocab_size = 37});
  const auto backend = kernels::make_cpu_backend(1);
  const std::vector<int32_t> tokens(8, 3);
  const model::MicroBatch mb{
      .tokens_BT = tokens.data(), .targets_BT = tokens.data(), .B = 1, .T = 8};
  for (const auto kind :
       {geometry::ScheduleKind::k1F1B, geometry::ScheduleKind::kZbH1}) {
    const auto board = board::Board::create(1, 0).value();
    const auto comms = comm::make_local_comms(1);
    const auto mesh = comm::Mesh::make(*comms[0], {}).value();
    const auto engine =
        make_engine(table, *mesh, {.schedule = kind, .max_seq = 8}, *backend,
                    Progress(board.get()))
            .value();
    initialise(*engine, *backend, /*seed=*/1);
    engine->state_loaded();
    uint64_t before = board->snapshot().progress();
    int polls = 0;
    engine->set_poll([&] {
      const uint64_t now = board->snapshot().progress();
      EXPECT_NE(now, before) << "poll " << polls;
      before = now;
      ++polls;
    });
    ASSERT_OK(engine->run({.microbatches = {&mb, 1}, .global_tokens = 8}));
    EXPECT_GE(polls, 3 * kLayers);
  }
}

// A frozen parameter keeps its bits, and the others are updated as if its
// gradient were none; another learning rate is another step size.
TEST(Engine, ParameterRulesApplyOnAnyMesh) {
  Case c{.model = geometry::llama(16, 2, 4, 2, 40, 37),
         .options = {.num_microbatches = 2,
                     .max_seq = 8,
                     .optimizer = {.eps = 1e-5, .weight_decay = 0.1}},
         .sequences = 2,
         .steps = 1};
  const Outcome plain = run_case(c);
  const auto table = geometry::ParamTable::make(c.model);
  c.steps = 0;
  const Outcome before = run_case(c);
  c.steps = 1;
  for (size_t i = 0; i < table.size(); ++i)
    c.options.optimizer.rules.push_back(
        {.lr = i == 3 ? 0.25 : 1.0,
         .weight_decay = table[i].decay ? 0.1 : 0,
         .frozen = i < 2});
  const Outcome want = run_case(c);
  ASSERT_OK(want.status);
  EXPECT_LT(want.norm[0], plain.norm[0]);
  for (size_t i = 0; i < table.size(); ++i)
    for (int64_t e = 0; e < table[i].numel(); ++e) {
      const auto at = static_cast<size_t>(table.offset(i) + e);
      const float moved = plain.weights[at] - before.weights[at];
      const double share = i < 2 ? 0 : i == 3 ? 0.25 : 1;
      ASSERT_NEAR(want.weights[at] - before.weights[at], share * moved,
                  share == 0 ? 0 : 1e-6)
          << table[i].name;
    }
  for (const bool out_of_place : {false, true}) {
    Case split = c;
    split.out_of_place = out_of_place;
    split.layout = {.dp = 2, .tp = 2};
    split.options.zero.stage = 1;
    const Outcome got = run_case(split);
    ASSERT_OK(got.status);
    EXPECT_NEAR(got.norm[0] / want.norm[0], 1, 1e-5);
    EXPECT_LE(largest_difference(c.model, got.weights, want.weights).value,
              1e-4);
    for (int64_t e = 0; e < table.offset(2); ++e)
      ASSERT_EQ(got.weights[static_cast<size_t>(e)],
                before.weights[static_cast<size_t>(e)]);
  }
}

TEST(Engine, TokensWithoutATargetDoNotCount) {
  Case c{.model = geometry::llama(16, 2, 4, 2, 40, 37),
         .options = {.num_microbatches = 1,
                     .max_seq = 8,
                     .optimizer = {.eps = 1e-5, .max_norm = 1}},
         .sequences = 1};
  const Outcome want = run_case(c);
  c.layout.dp = 2;
  c.options.num_microbatches = c.sequences = 4;
  c.masked = Masked::kAllButTheFirstSequence;
  const Outcome got = run_case(c);
  ASSERT_OK(got.status);
  for (size_t s = 0; s < want.loss.size(); ++s) {
    EXPECT_NEAR(got.loss[s] / want.loss[s], 1, 1e-5);
    EXPECT_NEAR(got.norm[s] / want.norm[s], 1, 1e-5);
  }
  EXPECT_NEAR(got.evaluated / want.evaluated, 1, 1e-5);
  const Difference d = largest_difference(c.model, got.weights, want.weights);
  EXPECT_LE(d.value, 1e-4) << d.param;
}

// Nothing of a token that does not count is in any gradient.
TEST(Engine, WithoutAnyTargetEveryGradientIsExactlyZero) {
  Case c{.model = geometry::llama(16, 2, 4, 2, 40, 37),
         .options = {.num_microbatches = 4, .max_seq = 8},
         .steps = 1};
  for (const geometry::Layout& layout :
       {geometry::Layout{}, {.dp = 2, .tp = 2}, {.pp = 2, .cp = 2}}) {
    c.layout = layout;
    for (const Masked masked : {Masked::kSome, Masked::kAll}) {
      c.masked = masked;
      const Outcome got = run_case(c);
      ASSERT_OK(got.status);
      const bool all_zero =
          std::ranges::all_of(got.first_grad, [](float g) { return g == 0; });
      EXPECT_EQ(all_zero, masked == Masked::kAll) << layout.to_string();
      EXPECT_EQ(got.norm[0] == 0, masked == Masked::kAll);
    }
  }
}

// Changes no bit: ZeRO stage, schedule, chunks and recomputation, and, unless
// an embedding is tied over two stages, pp.
TEST(Engine, ZeroStagesAndSchedulesGiveTheSameBits) {
  for (const uint32_t seed : test_seeds(3)) {
    if (HasFailure()) break;
    Case base = random_case(seed, 8);
    base.options.zero = {};
    base.options.chunks = 1;
    base.options.schedule = geometry::ScheduleKind::k1F1B;
    const Outcome want = run_case(base);
    ASSERT_OK(want.status);
    const auto expect_same = [&](const Case& c) {
      SCOPED_TRACE(c.to_string());
      note(c);
      const Outcome got = run_case(c);
      ASSERT_OK(got.status);
      EXPECT_EQ(got.loss, want.loss);
      EXPECT_EQ(got.norm, want.norm);
      EXPECT_EQ(got.first_grad, want.first_grad);
      EXPECT_EQ(got.weights, want.weights);
      EXPECT_EQ(got.evaluated, want.evaluated);
    };
    for (int stage = 1; stage <= 3; ++stage) {
      Case c = base;
      c.options.zero.stage = stage;
      expect_same(c);
    }
    for (const auto kind :
         {geometry::ScheduleKind::kGpipe, geometry::ScheduleKind::kZbH1,
          geometry::ScheduleKind::kInterleaved1F1B}) {
      Case c = base;
      c.options.schedule = kind;
      c.options.zero.stage = seed % 2 == 0 ? 0 : 3;
      if (kind == geometry::ScheduleKind::kInterleaved1F1B &&
          base.layout.pp > 1 && base.model.n_layers >= 2 * base.layout.pp)
        c.options.chunks = 2;
      expect_same(c);
    }
    Case c = base;
    c.layout.pp = base.layout.pp == 1 && base.model.n_layers > 1 &&
                          base.layout.world() <= 4
                      ? 2
                      : 1;
    if (!base.model.tie_embeddings) expect_same(c);
  }
}

// Where the state lives changes no bit either.
TEST(Engine, OutOfPlaceUpdatesGiveTheSameBits) {
  const bool bf16 = kernels::make_cpu_backend(1)->supports_bf16();
  for (const uint32_t seed : test_seeds(10)) {
    if (HasFailure()) break;
    Case c = random_case(seed, 8);
    if (bf16 && seed % 3 == 2) c.options.dtype = model::Dtype::kBf16;
    SCOPED_TRACE(c.to_string());
    note(c);
    const Outcome want = run_case(c);
    c.out_of_place = true;
    const Outcome got = run_case(c);
    ASSERT_OK(want.status);
    ASSERT_OK(got.status);
    EXPECT_EQ(got.loss, want.loss);
    EXPECT_EQ(got.norm, want.norm);
    EXPECT_EQ(got.weights, want.weights);
    EXPECT_EQ(got.evaluated, want.evaluated);
  }
}

// The state keeps its bits, and the next step computes with it.
TEST(Engine, ASkippedStepMakesNoUpdate) {
  for (const uint32_t seed : test_seeds(6)) {
    if (HasFailure()) break;
    Case c = random_case(seed, 8);
    c.out_of_place = seed % 2 == 0;
    SCOPED_TRACE(c.to_string());
    const Outcome all = run_case(c);
    c.skipped_step = 2;
    c.steps = 2;
    const Outcome two = run_case(c);
    c.steps = 1;
    const Outcome one = run_case(c);
    ASSERT_OK(two.status);
    EXPECT_EQ(two.weights, one.weights);
    c.steps = 3;
    const Outcome three = run_case(c);
    EXPECT_EQ(three.loss[1], all.loss[1]);
    EXPECT_NE(three.loss[2], all.loss[2]);
    EXPECT_NE(three.weights, two.weights);
  }
}

TEST(Engine, NotFiniteStopsEveryRankWithTheStateUntouched) {
  Case c{.model = geometry::llama(16, 2, 4, 2, 40, 37),
         .layout = {.dp = 2, .pp = 2},
         .options = {.zero = {.stage = 3}, .num_microbatches = 4, .max_seq = 8},
         .lr = 1e30};
  // The first update makes the weights so large that the loss overflows; the
  // second step detects it, and changes nothing, which run_case() checks.
  const Outcome o = run_case(c);
  ASSERT_FALSE(o.status.ok());
  EXPECT_SAYS(o.status, "at step 2 the loss is ");
  EXPECT_SAYS(o.status, "Continue from step 1 with a lower learning rate");
  EXPECT_EQ(o.loss.size(), 1U);
  // The gradient of the first step overflows, whatever the learning rate is.
  c.options.z_loss = 3e38;
  EXPECT_SAYS(run_case(c).status, "it is what the initial weights give");
}

TEST(Engine, RefusesImpossibleOptionsAndListsTheAllowedOnes) {
  const geometry::ModelConfig model = geometry::llama(16, 2, 4, 2, 40, 37);
  const auto table = geometry::ParamTable::make(model);
  const auto backend = kernels::make_cpu_backend(1);
  const auto why = [&](const geometry::Layout& layout, EngineOptions o) {
    o.max_seq = o.max_seq == 1 ? 8 : o.max_seq;
    const auto e = Engine::prepare(table, layout, 0, o, *backend, {});
    return e.ok() ? "accepted" : e.status().message();
  };
  using Kind = geometry::ScheduleKind;
  EXPECT_EQ(why({}, {}), "accepted");
  EXPECT_HAS(why({.cp = 2}, {.max_seq = 10}), "allowed: a multiple of 4");
  EXPECT_HAS(why({.pp = 3}, {}), "allowed: 1 to 2");
  EXPECT_HAS(why({.tp = 3}, {}), "allowed");
  EXPECT_HAS(why({.pp = 2}, {.chunks = 2}), "need the interleaved schedule");
  EXPECT_HAS(why({.pp = 2}, {.schedule = Kind::kInterleaved1F1B, .chunks = 2}),
             "allowed: 1 to 2");
  EXPECT_HAS(why({.dp = 3}, {.zero = {.stage = 1, .shard_group = 2}}),
             "must divide");
  EXPECT_HAS(why({}, {.zero = {.stage = 4}}), "0 to 3");
  EXPECT_HAS(why({}, {.num_microbatches = 0}), "at least 1");
}

}  // namespace
}  // namespace remesh::engine
