// Memory of trainers on devices, beside what a paper reports.
#include <gtest/gtest.h>

#include "parallel/planner/memory.h"
#include "tests/unit/planner/round_machine.h"

namespace remesh::planner {
namespace {

using geometry::Layout;
using geometry::Recompute;

constexpr double kGiB = 1024.0 * 1024 * 1024;

MemoryUse memory(const JobShape& s, const Layout& l, const Execution& run,
                 int pp_rank = 0) {
  return predict_memory(s, l, pp_rank, run,
                        parts_of(round_machine(), s, l, run));
}

// Korthikanti et al. 2022: the models of table 3; the memory of a device that
// section 6 reports, in GiB.
struct Published {
  const char* name;
  int64_t heads, dim, layers, B, microbatches;
  int pp, chunks;
  double states, none, selective;
};
constexpr Published kPublished[] = {
    {"22B", 64, 6144, 48, 4, 1, 1, 1, 45.56, 59.25, 9.56},
    {"175B", 96, 12288, 96, 1, 64, 8, 3, 45.56, 66.84, 12.35},
    {"530B", 128, 20480, 105, 1, 280, 35, 3, 31.64, 114.02, 23.08},
    {"1T", 160, 25600, 128, 1, 512, 64, 1, 32.96, 131.25, 26.56}};

TEST(DeviceMemory, IsWhatKorthikantiReports) {
  for (const Published& p : kPublished) {
    JobShape s = gpt(p.microbatches);
    s.model.dim = p.dim;
    s.model.n_layers = p.layers;
    s.model.n_heads = s.model.n_kv_heads = p.heads;
    s.model.hidden_dim = 4 * p.dim;
    s.B = p.B;
    s.chunks = p.chunks;
    if (p.chunks > 1) s.schedule = geometry::ScheduleKind::kInterleaved1F1B;
    const Layout l{.pp = p.pp, .tp = 8};
    Execution run{.fused_attention = false, .sequence_parallel = false};
    // The paper counts the layers' parameters: a stage without vocabulary.
    const MemoryUse states = memory(s, l, run, p.pp / 2);
    const auto gib = [](uint64_t bytes) {
      return static_cast<double>(bytes) / kGiB;
    };
    const auto near = [&](uint64_t bytes, double expected, const char* what) {
      EXPECT_NEAR(gib(bytes) / expected, 1, 0.03) << p.name << ": " << what;
    };
    near(states.weights + states.gradients + states.optimizer, p.states,
         "parameters and optimizer");
    near(memory(s, l, run).activations, p.none, "no recomputation");
    run.sequence_parallel = true;
    s.recompute = Recompute::kSelective;
    near(memory(s, l, run).activations, p.selective,
         "sequence parallelism and selective recomputation");
  }
}

TEST(DeviceMemory, ActivationsAreThoseOfThePapersFormula) {
  JobShape s = gpt(1);
  s.B = 4;
  const Layout l{.tp = 8};
  const double sbh = 2048.0 * 4 * 4096;
  const double scores = 5 * 32 * 2048.0 / 4096;
  const double head = 4 * sbh / 8 + 4 * 2048.0 * 4 * 51200 / 8;
  Execution run{.fused_attention = false};
  const auto activations = [&] {
    return static_cast<double>(memory(s, l, run).activations);
  };
  EXPECT_NEAR(activations(), 32 * sbh * (34 + scores) / 8 + head, 1);
  run.sequence_parallel = false;
  EXPECT_NEAR(activations() - 4 * sbh * 7 / 8,
              32 * sbh * (10 + (24 + scores) / 8) + head, 1);
  s.recompute = Recompute::kFull;
  EXPECT_NEAR(activations() - 4 * sbh * 7 / 8, 32 * sbh * 2 + head, 1);
}

// Query, key, value and the result of attention, of 2 bytes each.
TEST(DeviceMemory, HeadsCountWithTheirOwnSize) {
  JobShape s = gpt(1);
  s.model.n_kv_heads = 8;
  const MemoryUse own = memory(s, {}, {});
  s.model.head_size = 2 * 4096 / 32;
  const MemoryUse twice = memory(s, {}, {});
  EXPECT_NEAR(static_cast<double>(twice.activations - own.activations),
              32 * 2048.0 * (4 * 4096 + 4 * 1024), 1);
  s.recompute = Recompute::kSelective;
  const double kept = static_cast<double>(memory(s, {}, {}).activations);
  s.model.head_size = 0;
  EXPECT_NEAR(kept - static_cast<double>(memory(s, {}, {}).activations),
              32 * 2048.0 * (4 * 4096 + 2 * 1024), 1);
}

TEST(DeviceMemory, RecomputationNeedsRoomForOneLayer) {
  JobShape s = gpt(1);
  const MemoryUse none = memory(s, {}, {});
  s.recompute = Recompute::kFull;
  const MemoryUse full = memory(s, {}, {});
  EXPECT_NEAR(static_cast<double>(full.buffers - none.buffers),
              2048.0 * 4096 * (34 - 2), 1);
}

// With fused attention: the layer's input, attention's output, and of the
// products with q, k, v, o, up, down every second.
TEST(DeviceMemory, SelectiveRecomputationKeepsEverySecondProduct) {
  JobShape s = gpt(1);
  s.model.vocab_size = 1;
  const auto layers = [&] {
    return static_cast<double>(memory(s, {}, {}).activations) -
           4 * 2048.0 * (4096 + 1);
  };
  EXPECT_NEAR(layers(), 32 * 2048.0 * 34 * 4096, 1);
  s.recompute = Recompute::kSelective;
  EXPECT_NEAR(layers(), 32 * 2048.0 * (4 + 4 + 2 + 8) * 4096, 1);
}

TEST(DeviceMemory, ZeroShardsOptimizerGradientsAndWeightsInTurn) {
  JobShape s = gpt(64);
  const double layer = 12.0 * 4096 * 4096, tables = 2 * 51200.0 * 4096;
  const double all = 32 * layer + tables;
  const auto at = [&](int zero) {
    s.zero_stage = zero;
    return memory(s, {.dp = 8}, {});
  };
  const auto is = [](uint64_t bytes, double expected) {
    EXPECT_NEAR(static_cast<double>(bytes), expected, 1);
  };
  is(at(0).optimizer, 8 * all);
  is(at(0).weights, 6 * all);
  is(at(1).optimizer, 8 * all / 8);
  is(at(1).weights, 4 * all / 8 + 2 * all);
  is(at(1).gradients, 4 * all);
  is(at(2).gradients, 4 * (all / 8 + layer + tables));
  is(at(2).weights, 4 * all / 8 + 2 * all);
  is(at(3).weights, 4 * all / 8 + 2 * (2 * layer + tables));
}

TEST(DeviceMemory, TheFirstStageHoldsMostMicrobatches) {
  JobShape s = gpt(64);
  s.model.vocab_size = 1;
  const Layout l{.pp = 4};
  const auto activations = [&](int rank) {
    return static_cast<double>(memory(s, l, {}, rank).activations);
  };
  EXPECT_NEAR(activations(0) / activations(2), 2, 1e-6);
  // Interleaved, (p - 1) / v more (Narayanan et al. 2021).
  const double plain = activations(0);
  s.chunks = 2;
  s.schedule = geometry::ScheduleKind::kInterleaved1F1B;
  EXPECT_NEAR(activations(0) / plain, (4 + 1.5) / 4, 1e-6);
  s.microbatches = 2;
  EXPECT_NEAR(activations(0) / plain, 0.5, 1e-6);
}

}  // namespace
}  // namespace remesh::planner
