#include "parallel/planner/step_cost.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "parallel/planner/collective.h"
#include "tests/testing/seed.h"
#include "tests/unit/planner/round_machine.h"

namespace remesh::planner {
namespace {

using geometry::Layout;
using geometry::Recompute;

double seconds(const Machine& m, const JobShape& s, const Layout& l,
               const Execution& run = {}) {
  return predict_step(m, s, l, run).total_s;
}

TEST(Collective, AGatherMovesAllButItsOwnPart) {
  // 7 of 8 parts of 8 GB at 100 GB/s, 7 hops and the base.
  EXPECT_NEAR(gather_s(round_machine(), {.size = 8}, 8e9), 0.070017, 1e-9);
}

TEST(Collective, AnAllReduceIsTwoGathersWithOneStart) {
  EXPECT_NEAR(all_reduce_s(round_machine(), {.size = 8}, 8e9), 0.140024, 1e-9);
}

TEST(Collective, TheNodesOfAGroupShareTheLinksOfTheirMembers) {
  const Machine m = round_machine();
  // 2 nodes; 15/16 of 16 GB over 8 links of 10 GB/s each: 80 GB/s.
  EXPECT_NEAR(gather_s(m, {.size = 16}, 16e9), 15e9 / 80e9 + 34e-6, 1e-9);
  // Every 8th rank: one link of 10 GB/s.
  EXPECT_NEAR(gather_s(m, {.size = 2, .stride = 8}, 2e9), 0.1 + 20e-6, 1e-9);
}

TEST(Collective, BeyondASwitchTheNetworkIsOversubscribed) {
  Machine m = round_machine();
  m.switch_devices = 16;
  m.oversubscription = 4;
  const Group under{.size = 2, .stride = 8}, beyond{.size = 4, .stride = 8};
  EXPECT_EQ(gather_s(m, under, 2e9), gather_s(round_machine(), under, 2e9));
  EXPECT_NEAR(gather_s(m, beyond, 2e9) - gather_s(round_machine(), beyond, 2e9),
              1.5 * (1 / 2.5 - 1 / 10.0), 1e-9);
  EXPECT_EQ(send_s(m, 15, 1e9), send_s(round_machine(), 15, 1e9));
  EXPECT_NEAR(send_s(m, 16, 1e9) - send_s(round_machine(), 16, 1e9), 0.3, 1e-9);
  // Of four stages of 8 devices two neighbors are under different switches.
  const Layout l{.pp = 4, .tp = 8};
  EXPECT_GT(seconds(m, gpt(32), l), seconds(round_machine(), gpt(32), l));
  m.switch_devices = 32;
  EXPECT_EQ(seconds(m, gpt(32), l), seconds(round_machine(), gpt(32), l));
}

TEST(Collective, AcrossManyNodesATreeBeatsTheRingForSmallVectors) {
  // 256 nodes: 16 steps between nodes instead of 510.
  EXPECT_NEAR(all_reduce_s(round_machine(), {.size = 256, .stride = 8}, 0),
              170e-6, 1e-9);
}

TEST(Collective, SwitchesThatAddUpMakeAnAllReduceFaster) {
  const Machine plain = round_machine();
  Machine m = plain;
  m.in_switch = 0.8;
  // 9/8 of 8 GB at 80 GB/s, a hop up and one down, and the base.
  EXPECT_NEAR(all_reduce_s(m, {.size = 8}, 8e9), 0.112512, 1e-9);
  // Two nodes: 1/8 of 16 GB over each link of 8 GB/s, and two steps of a tree.
  EXPECT_NEAR(all_reduce_s(m, {.size = 16}, 16e9), 0.250042, 1e-9);
  // Of two members each sends less in a ring; one of a node meets no other.
  for (const Group& g : {Group{.size = 2}, Group{.size = 4, .stride = 8}})
    EXPECT_EQ(all_reduce_s(m, g, 8e9), all_reduce_s(plain, g, 8e9));
  EXPECT_EQ(gather_s(m, {.size = 8}, 8e9), gather_s(plain, {.size = 8}, 8e9));
}

TEST(Gemm, TakesWholeWavesOfTiles) {
  // 16 x 32 = 512 tiles of 256 x 128 on 100 cores: 6 waves instead of 5.12, and
  // a ramp of 256 steps.
  const double wave = 2.0 * 256 * 128 * (4096 + 256) * 100 / 1e14;
  EXPECT_NEAR(gemm_s(round_machine(), {4096, 4096, 4096}, Precision::k16),
              6 * wave, 1e-5);
}

TEST(Gemm, IsBoundByMemoryWhereTheInnerDimensionIsSmall) {
  // The output alone is 2 x 8192^2 bytes at 1e12 B/s.
  EXPECT_GT(gemm_s(round_machine(), {8192, 8192, 1}, Precision::k16), 134e-6);
}

TEST(Gemm, Fp8IsFaster) {
  const Machine m = round_machine();
  const Gemm g{8192, 8192, 8192};
  EXPECT_NEAR(gemm_s(m, g, Precision::kFp8) / gemm_s(m, g, Precision::k16), 0.5,
              0.01);
}

TEST(Layer, ElementsAreThoseOfTheParameterTable) {
  JobShape s = gpt(1);
  EXPECT_EQ(layer_elements(s, {}), 12.0 * 4096 * 4096);
  s.model.arch = "llama";
  s.model.n_kv_heads = 8;
  s.model.hidden_dim = 14336;
  // Query and output, key and value of a quarter of their width, and three of
  // the feed-forward.
  EXPECT_EQ(layer_elements(s, {}), 4096.0 * (2 * 4096 + 2 * 1024 + 3 * 14336));
  // Sixteen ranks hold copies of the eight key and value heads.
  EXPECT_EQ(layer_elements(s, {.tp = 16}),
            4096.0 * (2 * 4096 + 3 * 14336) / 16 + 4096.0 * 2 * 1024 / 8);
}

TEST(Layer, TensorParallelCommunicationIsTwoAllReducesEachWay) {
  const Machine m = round_machine();
  const JobShape s = gpt(1);
  const Layout l{.tp = 8};
  const double bytes = 2048.0 * 4096 * 2;
  const Passes plain = layer_passes(m, s, l, {.sequence_parallel = false});
  EXPECT_NEAR(plain.forward.tensor, 2 * all_reduce_s(m, {.size = 8}, bytes),
              1e-12);
  EXPECT_NEAR(plain.backward.tensor, plain.forward.tensor, 1e-12);
  // In pieces only the first shows.
  const Passes pieces = layer_passes(
      m, s, l, {.sequence_parallel = false, .overlap_tensor = true});
  EXPECT_NEAR(pieces.forward.tensor, plain.forward.tensor / 8, 1e-12);
}

TEST(Layer, FusedAttentionTakesHalfOfTheSquare) {
  JobShape s = gpt(1);
  const auto forward = [&] {
    return layer_passes(round_machine(), s, {}, {}).forward.attention;
  };
  EXPECT_NEAR(forward(), 2.0 * 2048 * (2048 + 128) * 4096 / 5e13, 1e-9);
  // Heads of another size than their share of the stream.
  s.model.head_size = 64;
  EXPECT_NEAR(forward(), 2.0 * 2048 * (2048 + 128) * 32 * 64 / 5e13, 1e-9);
}

// Over its first tokens a window is not full.
TEST(Layer, AttentionOverAWindowTakesItsShare) {
  JobShape s = gpt(1);
  s.model.arch = "mistral";
  const double whole = predict_step(round_machine(), s, {}, {}).terms.attention;
  s.model.sliding_window = 512;
  EXPECT_NEAR(predict_step(round_machine(), s, {}, {}).terms.attention / whole,
              (512 * (2 - 512.0 / 2048) + 128) / (2048 + 128), 1e-6);
}

// The engine repeats attention with its ring and the products before the
// activation, and nothing where backward is split.
TEST(Layer, TheEnginesSelectiveRecomputationRepeatsAttention) {
  const Machine m = round_machine();
  JobShape s = gpt(8);
  s.recompute = Recompute::kSelective;
  const Execution run{.recomputes_attention = true};
  const Passes p = layer_passes(m, s, {.cp = 2}, run);
  EXPECT_EQ(p.again.attention, p.forward.attention);
  EXPECT_EQ(p.again.context, p.forward.context);
  EXPECT_GT(p.again.gemm, 0.2 * p.forward.gemm);
  EXPECT_LT(p.again.gemm, 0.8 * p.forward.gemm);
  s.schedule = geometry::ScheduleKind::kZbH1;
  JobShape none = s;
  none.recompute = Recompute::kNone;
  EXPECT_EQ(seconds(m, s, {.pp = 4}, run), seconds(m, none, {.pp = 4}, run));
  EXPECT_GT(seconds(m, s, {}, run), seconds(m, none, {}, run));
}

TEST(Layer, ARingOverNodesIsAsFastAsTheNetwork) {
  const Machine m = round_machine();
  const JobShape s = gpt(1);
  const auto context = [&](const Layout& l) {
    return layer_passes(m, s, l, {}).forward.context;
  };
  Machine slow = m;
  slow.network_bytes_per_s /= 10;
  const auto on_slow = [&](const Layout& l) {
    return layer_passes(slow, s, l, {}).forward.context;
  };
  EXPECT_EQ(on_slow({.cp = 8}), context({.cp = 8}));
  EXPECT_GT(on_slow({.cp = 16}), 2 * context({.cp = 16}));
}

TEST(Layer, WhatIsAddedUpMayBeWiderThanWhatIsSent) {
  const Machine m = round_machine();
  const JobShape s = gpt(1);
  const auto all = [&](const Execution& run) {
    return layer_passes(m, s, {.tp = 2}, run).forward.tensor;
  };
  const double both = all({}), wide = all({.sum_bytes = 4});
  EXPECT_NEAR(wide / both, 1.5, 0.07);  // and the latency
}

TEST(Layer, RecomputationRepeatsWhatItSays) {
  const Machine m = round_machine();
  JobShape s = gpt(1);
  const auto again = [&](bool fused) {
    return layer_passes(m, s, {}, {.fused_attention = fused}).again;
  };
  EXPECT_EQ(again(true).total(), 0);
  s.recompute = Recompute::kSelective;
  const Passes unfused = layer_passes(m, s, {}, {.fused_attention = false});
  EXPECT_EQ(unfused.again.attention, unfused.forward.attention);
  EXPECT_EQ(unfused.again.gemm, 0);
  EXPECT_EQ(again(true).attention, 0);
  s.recompute = Recompute::kFull;
  const Passes full = layer_passes(m, s, {}, {});
  EXPECT_NEAR(full.again.gemm, full.forward.gemm, 1e-12);
  s.recompute_every = 4;
  EXPECT_NEAR(again(true).gemm, full.forward.gemm / 4, 1e-12);
}

// With a vocabulary of nothing all stages are equal, and 1F1B takes
// m + p - 1 times forward and backward.
TEST(Pipeline, OneForwardOneBackwardHasItsClosedForm) {
  Machine m = round_machine();
  m.straggle = 0;
  for (const int64_t n : {8, 9, 17, 40, 1001}) {
    JobShape s = gpt(n);
    s.model.vocab_size = 1;
    Machine fast = m;  // no launches, no optimizer to speak of
    fast.launch_s = 0;
    const Execution run{.overlap_pipeline = false};
    const Passes layer = layer_passes(fast, s, {}, run);
    const double message = send_s(fast, 1, 2048.0 * 4096 * 2);
    const double pass = 8 * layer.all().total() + 2 * message;
    const Terms t = predict_step(fast, s, {.pp = 4}, run).terms;
    const double expected = (static_cast<double>(n) + 3) * pass;
    EXPECT_NEAR(t.total() - t.optimizer, expected, 0.01 * expected) << n;
  }
}

TEST(Pipeline, LongSchedulesAreExtrapolatedExactly) {
  // Unequal stages: the head. Each further microbatch takes as long as the
  // last, by the simulation (up to 32) and beyond.
  const Machine m = round_machine();
  const Layout l{.pp = 4};
  const auto step = [&](int64_t n) { return seconds(m, gpt(n), l); };
  const double period = step(16) - step(12);
  EXPECT_NEAR(step(64) - step(60), period, 1e-9);
  EXPECT_NEAR(step(403) - step(399), period, 1e-9);
}

// 49 layers in eight parts. In short schedules the last rank sets the pace,
// which has less work than the first.
TEST(Pipeline, InLongSchedulesTheBusiestRankSetsThePace) {
  const auto bubble = [](int64_t n) {
    JobShape s = gpt(n);
    s.model.vocab_size = 1;
    s.model.n_layers = 49;
    s.schedule = geometry::ScheduleKind::kInterleaved1F1B;
    s.chunks = 2;
    return predict_step(round_machine(), s, {.pp = 4}, {}).terms.bubble;
  };
  EXPECT_LT(bubble(16), bubble(12));
  EXPECT_GT(bubble(160), 0);
  EXPECT_NEAR(bubble(400), bubble(160), 1e-6);
}

TEST(Pipeline, InterleavingDividesTheBubble) {
  const Machine m = round_machine();
  JobShape s = gpt(16);
  s.model.vocab_size = 1;
  const double plain = predict_step(m, s, {.pp = 4}, {}).terms.bubble;
  s.schedule = geometry::ScheduleKind::kInterleaved1F1B;
  s.chunks = 4;
  const double four = predict_step(m, s, {.pp = 4}, {}).terms.bubble;
  EXPECT_NEAR(four / plain, 0.25, 0.05);
}

// Ranks skip the passes of microbatches that they do not have.
TEST(Pipeline, MicrobatchesNeedNotBeAMultipleOfTheStages) {
  const Machine m = round_machine();
  const auto step = [&](int64_t n) {
    JobShape s = gpt(n);
    s.schedule = geometry::ScheduleKind::kInterleaved1F1B;
    s.chunks = 4;
    return seconds(m, s, {.pp = 4});
  };
  for (const int64_t n : {9, 49}) {  // short, and extrapolated
    EXPECT_GT(step(n), step(n - 1)) << n;
    EXPECT_LT(step(n) - step(n - 1), 0.8 * (step(n + 3) - step(n - 1))) << n;
  }
}

TEST(Pipeline, ZeroBubbleIsFaster) {
  const Machine m = round_machine();
  JobShape s = gpt(8);
  const double plain = seconds(m, s, {.pp = 4});
  s.schedule = geometry::ScheduleKind::kZbH1;
  EXPECT_LT(seconds(m, s, {.pp = 4}), plain);
}

TEST(Data, OverlapHidesAllButContention) {
  const Machine m = round_machine();
  const JobShape s = gpt(64);
  const Layout l{.dp = 8};
  const double shown =
      predict_step(m, s, l, {.overlap_data = false}).terms.data;
  const double hidden =
      predict_step(m, s, l, {.overlap_data = true}).terms.data;
  EXPECT_NEAR(hidden / shown, 0.3, 1e-6);
}

TEST(Data, ShardedWeightsMoveWithEveryMicrobatch) {
  const Machine m = round_machine();
  JobShape s = gpt(64);
  s.zero_stage = 3;
  const Execution run{.overlap_data = false};
  const auto data = [&](int64_t microbatches) {
    s.microbatches = microbatches;
    return predict_step(m, s, {.dp = 8}, run).terms.data;
  };
  EXPECT_NEAR(data(64) / data(8), 8, 1e-6);
  const double three = data(64);
  s.zero_stage = 2;
  EXPECT_LT(data(64), three);  // no gather in backward
}

TEST(Data, HybridShardingKeepsTheGathersInTheNode) {
  Machine m = round_machine();
  m.node_bytes_per_s = 1e12;
  JobShape s = gpt(64);
  s.zero_stage = 3;
  const double all = predict_step(m, s, {.dp = 64}, {}).terms.data;
  s.shard_group = 8;
  EXPECT_LT(predict_step(m, s, {.dp = 64}, {}).terms.data, all);
}

TEST(Step, TermsAddUpAndTokensFollow) {
  const StepCost c =
      predict_step(round_machine(), gpt(16), {.dp = 2, .tp = 2}, {});
  EXPECT_NEAR(c.total_s, c.terms.total(), 1e-12);
  EXPECT_NEAR(c.tokens_per_s, 16 * 2048 / c.total_s / 4, 1e-6);
  EXPECT_GT(c.mfu, 0.1);
  EXPECT_LT(c.mfu, 0.5);  // the machine reaches half its peak at best
}

TEST(Step, MfuIsOfThePeakInThePrecisionOfTheProducts) {
  const auto mfu = [](Machine m, Precision precision) {
    m.flops = m.peak_flops;
    m.fp8_flops = m.peak_fp8_flops;
    const StepCost c = predict_step(m, gpt(16), {}, {.precision = precision});
    return std::pair(c.mfu, c.mfu / c.tokens_per_s);
  };
  const Machine m = round_machine();
  const auto bf16 = mfu(m, Precision::k16), fp8 = mfu(m, Precision::kFp8);
  EXPECT_NEAR(fp8.second / bf16.second, 0.5, 1e-12);
  EXPECT_LT(fp8.first, 1);
}

TEST(Step, GradientsAreAddedForEveryMicrobatch) {
  Machine m = round_machine();
  m.straggle = 0;
  const Layout one;
  for (const int64_t microbatches : {1, 3}) {
    JobShape s = gpt(microbatches);
    const double elements =
        32 * layer_elements(s, one) + vocabulary_elements(s, one);
    const auto step = [&](double bytes) {
      return seconds(m, s, one, {.accumulation_bytes = bytes});
    };
    EXPECT_NEAR(step(8) - step(0),
                static_cast<double>(microbatches) * 8 * elements / 1e12, 1e-6);
    s.zero_stage = 3;
    const auto sharded = [&](double bytes) {
      return seconds(m, s, {.dp = 2}, {.accumulation_bytes = bytes});
    };
    EXPECT_EQ(sharded(8), sharded(0));
  }
}

// A state of one host alone goes to another one within the next step, 12 bytes
// for each element.
TEST(Step, ReplicasMoveBehindTheStep) {
  Machine m = round_machine();
  m.straggle = 0;
  m.node_devices = 1;
  JobShape s = gpt(4);
  s.keep_state = true;
  const auto replicas = [&](const Layout& l) {
    return predict_step(m, s, l, {}).terms.replicas;
  };
  const Layout pipeline{.pp = 2}, replicated{.dp = 2};
  EXPECT_EQ(replicas(pipeline), 0) << "none are asked for";
  s.replicas = 1;
  EXPECT_EQ(replicas(replicated), 0) << "each host has the state";
  EXPECT_EQ(replicas({}), 0) << "there is no other host";
  const double bytes = 12 * (16 * layer_elements(s, pipeline) +
                             vocabulary_elements(s, pipeline));
  const double copies = 8 * bytes / m.memory_bytes_per_s;
  m.network_bytes_per_s = 1e12;
  EXPECT_NEAR(replicas(pipeline), copies, 1e-6) << "the move is hidden";
  m.network_bytes_per_s = 1e8;
  EXPECT_GT(replicas(pipeline), 0.9 * bytes / 1e8);
  const double always = replicas(pipeline);
  s.replicate_every = 4;
  EXPECT_NEAR(replicas(pipeline), always / 4, 1e-9);
  s.replicate_every = 1;
  s.replicas = 2;
  EXPECT_EQ(replicas(pipeline), always) << "there are two hosts";
  // The two ranks of a stage are on one host.
  m.node_devices = 2;
  EXPECT_GT(replicas({.dp = 2, .pp = 2}), 0);
  EXPECT_EQ(replicas({.dp = 4}), 0);
}

TEST(Step, AllWaitForTheSlowestOfAsManyNormalNumbers) {
  std::mt19937_64 rng(test_seed());
  std::normal_distribution<double> normal;
  EXPECT_EQ(slowest_of(1), 0);
  for (const int n : {2, 3, 8, 64, 1024}) {
    const int rounds = 2'000'000 / n;
    double sum = 0;
    for (int round = 0; round < rounds; ++round) {
      double most = normal(rng);
      for (int i = 1; i < n; ++i) most = std::max(most, normal(rng));
      sum += most;
    }
    EXPECT_NEAR(slowest_of(n) / (sum / rounds), 1, 0.06) << n;
  }
  Machine m = round_machine();
  m.straggle = 0.01;
  const Terms t = predict_step(m, gpt(8), {.dp = 8}, {}).terms;
  EXPECT_NEAR(t.straggle / (t.total() - t.straggle), 0.01 * slowest_of(8),
              1e-12);
}

TEST(Step, MoreOfAnythingIsNeverSlower) {
  JobShape s = gpt(32);
  const Layout layouts[] = {
      {.dp = 8},  {.dp = 2, .pp = 2, .tp = 2}, {.pp = 8},
      {.tp = 16}, {.dp = 4, .tp = 2, .cp = 2}, {.dp = 32}};
  double Machine::*const faster[] = {&Machine::flops,
                                     &Machine::attention_flops,
                                     &Machine::fp8_flops,
                                     &Machine::memory_bytes_per_s,
                                     &Machine::node_bytes_per_s,
                                     &Machine::network_bytes_per_s};
  double Machine::*const slower[] = {
      &Machine::launch_s, &Machine::collective_base_s, &Machine::node_hop_s,
      &Machine::network_hop_s, &Machine::straggle};
  for (const Layout& l : layouts)
    for (const int zero : {0, 1, 2, 3})
      for (const Precision precision : {Precision::k16, Precision::kFp8}) {
        s.zero_stage = zero;
        for (const bool overlap : {false, true}) {
          const Execution run{.precision = precision,
                              .overlap_data = overlap,
                              .overlap_tensor = overlap,
                              .overlap_pipeline = overlap};
          const double base = seconds(round_machine(), s, l, run);
          for (const auto field : faster) {
            Machine m = round_machine();
            m.*field *= 1.7;
            EXPECT_LE(seconds(m, s, l, run), base * (1 + 1e-12))
                << l.to_string() << " zero " << zero;
          }
          for (const auto field : slower) {
            Machine m = round_machine();
            m.*field *= 1.7;
            EXPECT_GE(seconds(m, s, l, run), base * (1 - 1e-12))
                << l.to_string() << " zero " << zero;
          }
        }
      }
}

TEST(Step, MoreWorkTakesLonger) {
  const Machine m = round_machine();
  const Layout l{.dp = 2, .tp = 2};
  JobShape s = gpt(8);
  const double base = seconds(m, s, l);
  s.microbatches = 16;
  EXPECT_GT(seconds(m, s, l), base);
  s = gpt(8);
  s.recompute = Recompute::kSelective;
  const double selective = seconds(m, s, l);
  s.recompute = Recompute::kFull;
  EXPECT_GT(selective, base);
  EXPECT_GT(seconds(m, s, l), selective);
}

// In the words of step_lower_bound_s().
TEST(Bound, IsNeverAboveTheStepAndExactWhereItSaysSo) {
  using geometry::ScheduleKind;
  JobShape s = gpt(24);
  const Machine m = round_machine();
  double worst = 1;
  for (const bool equal : {false, true})
    for (const Layout& l : {Layout{.dp = 8}, Layout{.dp = 3, .pp = 4, .tp = 2},
                            Layout{.pp = 8}, Layout{.dp = 2, .pp = 5, .cp = 2}})
      for (const auto& [kind, chunks] : {std::pair{ScheduleKind::k1F1B, 1},
                                         {ScheduleKind::kZbH1, 1},
                                         {ScheduleKind::kGpipe, 1},
                                         {ScheduleKind::kInterleaved1F1B, 2},
                                         {ScheduleKind::kInterleaved1F1B, 3}})
        for (const int zero : {0, 1, 3})
          for (const Recompute recompute : {Recompute::kNone, Recompute::kFull})
            for (const bool overlap : {false, true}) {
              s.schedule = kind;
              s.chunks = chunks;
              s.zero_stage = zero;
              s.recompute = recompute;
              s.model.n_layers = equal ? 4 * 5 * 3 * 8 : 33;
              s.model.vocab_size = equal ? 1 : 51200;
              const Execution run{.overlap_pipeline = overlap};
              const Parts parts = parts_of(m, s, l, run);
              const double bound = step_lower_bound_s(m, s, l, run, parts);
              const double step = seconds(m, s, l, run);
              EXPECT_LE(bound, step * (1 + 1e-9))
                  << l.to_string() << " " << geometry::schedule_name(kind);
              worst = std::min(worst, bound / step);
              if (l.pp == 1 || (equal && kind == ScheduleKind::k1F1B)) {
                EXPECT_NEAR(bound / step, 1, 1e-3) << l.to_string();
              }
            }
  EXPECT_GT(worst, 0.75);
}

}  // namespace
}  // namespace remesh::planner
