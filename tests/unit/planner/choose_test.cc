// Choosing a mesh for a model, compared with an exhaustive search.

#include <random>

#include "parallel/geometry/param_table.h"
#include "parallel/planner/local.h"
#include "parallel/planner/memory.h"
#include "parallel/planner/placement.h"
#include "tests/testing/expect.h"
#include "tests/testing/llama.h"
#include "tests/testing/seed.h"

namespace remesh::planner {
namespace {

using geometry::Layout;
using geometry::ScheduleKind;
using Rng = std::mt19937_64;

JobShape random_shape(Rng& rng) {
  JobShape s;
  const int heads = one_of(rng, {2, 4, 6, 8});
  s.model = {.dim = 16 * heads,
             .n_layers = pick(rng, 1, 6),
             .n_heads = heads,
             .n_kv_heads = one_of(rng, {1, 2, heads}),
             .hidden_dim = 64,
             .vocab_size = 257,
             .tie_embeddings = pick(rng, 0, 1) == 1};
  s.T = one_of(rng, {16, 24, 12});
  s.B = pick(rng, 1, 3);
  s.microbatches = pick(rng, 1, 12);
  s.bf16 = pick(rng, 0, 1) == 1;
  s.zero_stage = pick(rng, 0, 3);
  s.shard_group = s.zero_stage > 0 ? pick(rng, 0, 3) : 0;
  s.schedule =
      one_of(rng, {ScheduleKind::kGpipe, ScheduleKind::k1F1B,
                   ScheduleKind::kInterleaved1F1B, ScheduleKind::kZbH1});
  if (s.schedule == ScheduleKind::kInterleaved1F1B) s.chunks = pick(rng, 1, 3);
  s.recompute =
      one_of(rng, {geometry::Recompute::kNone, geometry::Recompute::kSelective,
                   geometry::Recompute::kFull});
  s.recompute_every = pick(rng, 1, 3);
  return s;
}

PlacementRequest random_request(Rng& rng) {
  PlacementRequest q;
  const int workers = pick(rng, 1, 4);
  for (int i = 0; i < workers; ++i)
    q.workers.push_back({.worker = "w" + std::to_string(i),
                         .host = "h" + std::to_string(pick(rng, 0, 1)),
                         .slots = pick(rng, 1, 4),
                         .cores = pick(rng, 1, 9)});
  const auto degree = [&] {
    return pick(rng, 0, 2) > 0 ? -1 : pick(rng, 1, 3);
  };
  q.degrees = {.dp = degree(), .tp = degree(), .pp = degree(), .cp = degree()};
  q.shape = random_shape(rng);
  q.microbatches = q.shape->microbatches;
  q.min_slots = pick(rng, 0, 3) == 0 ? pick(rng, 1, 3) : 1;
  q.max_slots = pick(rng, 0, 2) == 0 ? pick(rng, q.min_slots, 10) : -1;
  q.by_speed = pick(rng, 0, 2) == 0;
  if (pick(rng, 0, 2) == 0)
    for (WorkerSlots& w : q.workers) {
      w.core = reference_core();
      w.core->flops *= w.host == "h0" ? 1 : 2.5;
      w.core->fp32_flops = w.core->flops;
    }
  return q;
}

int slots_of(const PlacementRequest& q) {
  int n = 0;
  for (const auto& w : q.workers) n += w.slots;
  return n;
}

bool given(int degree, int value) { return degree == -1 || degree == value; }

// Calls f for every mesh that the request admits.
template <typename F>
void for_each_mesh(const PlacementRequest& q, const F& f) {
  int slots = slots_of(q);
  if (q.max_slots != -1) slots = std::min(slots, q.max_slots);
  for (int tp = 1; tp <= slots; ++tp)
    for (int pp = 1; tp * pp <= slots; ++pp)
      for (int cp = 1; tp * pp * cp <= slots; ++cp)
        for (int dp = 1; tp * pp * cp * dp <= slots; ++dp) {
          const Layout l{.dp = dp, .pp = pp, .tp = tp, .cp = cp};
          if (l.world() >= q.min_slots && given(q.degrees.dp, dp) &&
              given(q.degrees.tp, tp) && given(q.degrees.pp, pp) &&
              given(q.degrees.cp, cp) && admit(*q.shape, l).ok())
            f(l);
        }
}

// The most ranks of any of them; 0 if there is none.
int most_ranks(const PlacementRequest& q) {
  int most = 0;
  for_each_mesh(q, [&](const Layout& l) { most = std::max(most, l.world()); });
  return most;
}

// No mesh with as many ranks, of those that `may` be chosen, has a lower
// estimate.
template <typename May>
void expect_fastest(const PlacementRequest& q, const Layout& l,
                    const May& may) {
  const double mine = predict_step(q, l).total_s;
  for_each_mesh(q, [&](const Layout& o) {
    if (o.world() != l.world() || !may(o)) return;
    EXPECT_LE(mine, predict_step(q, o).total_s * (1 + 1e-12))
        << l.to_string() << " or " << o.to_string();
  });
}

// A host three times as fast gets three times as many microbatches, and a step
// takes as long as if its slow twin were not that slow.
TEST(Choose, SlowHostsGetFewerMicrobatches) {
  Rng rng(3);
  PlacementRequest q;
  q.shape = random_shape(rng);
  q.shape->microbatches = q.microbatches = 8;
  for (const char* host : {"a", "b"}) {
    q.workers.push_back({.worker = host, .host = host, .slots = 1, .cores = 1});
    Machine m = reference_core();
    if (*host == 'a')
      m.flops = m.fp32_flops = m.attention_flops = 3 * m.fp32_flops;
    q.workers.back().core = m;
  }
  ASSERT_OK_AND(const auto even, place_mesh(q));
  EXPECT_TRUE(even.shares.empty());
  const double slow = predict_step(q, even.layout).total_s;
  q.by_speed = true;
  ASSERT_OK_AND(const auto placed, place_mesh(q));
  EXPECT_EQ(placed.shares, (geometry::Shares{6, 2}));
  EXPECT_HAS(placed.reason, "6, 2 microbatches");
  EXPECT_LT(predict_step(q, placed.layout).total_s, 0.8 * slow);
  q.workers[1].core.reset();  // nobody knows what it does
  EXPECT_TRUE(place_mesh(q)->shares.empty());
}

// All ranks compute in fp32 where one host lacks bf16.
TEST(Choose, WithoutBf16OnOneHostAllAreAsFastAsInFp32) {
  Rng rng(3);
  PlacementRequest q;
  q.shape = random_shape(rng);
  q.shape->bf16 = true;
  q.shape->microbatches = q.microbatches = 16;
  q.by_speed = true;
  for (const char* host : {"a", "b"}) {
    Machine m = reference_core();
    m.flops = m.fp32_flops = 2e11;
    if (*host == 'a') m.flops = 8 * m.fp32_flops;
    q.workers.push_back(
        {.worker = host, .host = host, .slots = 1, .cores = 1, .core = m});
  }
  EXPECT_FALSE(place_mesh(q)->shares.empty());
  match_hosts(&q);
  EXPECT_FALSE(q.shape->bf16);
  EXPECT_TRUE(place_mesh(q)->shares.empty() ||
              place_mesh(q)->shares == (geometry::Shares{8, 8}));
  q.shape->bf16 = true;
  q.workers.pop_back();
  match_hosts(&q);
  EXPECT_TRUE(q.shape->bf16);
}

// Of ranks with a given number of threads the larger host is no faster.
TEST(Choose, GivenThreadsAreAllThatARankUses) {
  Rng rng(3);
  PlacementRequest q;
  q.shape = random_shape(rng);
  q.shape->microbatches = q.microbatches = 16;
  q.by_speed = true;
  for (const char* host : {"a", "b"})
    q.workers.push_back({.worker = host,
                         .host = host,
                         .slots = 1,
                         .cores = *host == 'a' ? 16 : 4,
                         .core = reference_core()});
  const auto shares = place_mesh(q)->shares;
  EXPECT_FALSE(shares.empty() || shares == (geometry::Shares{8, 8}));
  q.threads = 4;
  const auto even = place_mesh(q)->shares;
  EXPECT_TRUE(even.empty() || even == (geometry::Shares{8, 8}));
  const double all = rank_machine(q, 1).flops;
  q.threads = 1;
  EXPECT_NEAR(rank_machine(q, 1).flops, all / 4, 1);
}

// Three ranks on two hosts: two share one.
TEST(Choose, AllWaitForTheRankWithFewestCores) {
  PlacementRequest q;
  for (const char* host : {"a", "b"})
    q.workers.push_back({.worker = host, .host = host, .slots = 2, .cores = 8});
  EXPECT_NEAR(rank_machine(q, 3).flops, 4 * reference_core().flops, 1);
  EXPECT_NEAR(rank_machine(q, 1).flops, 8 * reference_core().flops, 1);
}

PlacementRequest small_request() {
  PlacementRequest q;
  q.shape = JobShape{.model = geometry::llama(64, 4, 4, 4, 128, 257),
                     .T = 16,
                     .microbatches = 8};
  q.microbatches = 8;
  q.workers = {{.worker = "a", .host = "a", .slots = 4, .cores = 4}};
  return q;
}

// Such as one that was pinned for a while.
TEST(Choose, ASmallerMeshThatWasFasterHasTheGivenDegrees) {
  PlacementRequest q = small_request();
  q.degrees.tp = 1;
  q.measured = {{place_mesh(q)->layout, 10, {"a"}}, {{.tp = 2}, 1, {"a"}}};
  EXPECT_EQ(place_mesh(q)->layout.tp, 1);
  q.measured[1].layout = {.dp = 2};
  EXPECT_EQ(place_mesh(q)->layout, Layout{.dp = 2});
}

// A mesh that ran is left only for one that is expected to be clearly faster,
// and the more the model was wrong, the more clearly.
TEST(Choose, WhatIsKnownIsLeftForAClearGainOnly) {
  PlacementRequest q = small_request();
  const Layout best = place_mesh(q)->layout;
  const Layout other =
      best == Layout{.dp = 4} ? Layout{.tp = 4} : Layout{.dp = 4};
  const auto after = [&](double of_best, double of_other) {
    q.measured = {{other, of_other * predict_step(q, best).total_s, {"a"}}};
    if (of_best > 0)
      q.measured.push_back(
          {best, of_best * predict_step(q, best).total_s, {"a"}});
    return place_mesh(q)->layout;
  };
  EXPECT_EQ(after(2, 1), other);
  EXPECT_EQ(after(1, 2), best);
  const ModelError one = model_error(q);
  EXPECT_NEAR(one.uncertainty, 1.25, 0.01);
  q.measured = {{best, 1, {"a"}}, {other, 1, {"a"}}};
  q.measured[0].seconds = predict_step(q, best).total_s;
  q.measured[1].seconds = 9 * predict_step(q, other).total_s;
  EXPECT_NEAR(model_error(q).factor, 3, 1e-9);
  EXPECT_NEAR(model_error(q).uncertainty, 3, 1e-9);
  const Layout third{.pp = 4};
  EXPECT_NEAR(expected_step_s(q, third), 9 * predict_step(q, third).total_s,
              1e-9);
  EXPECT_EQ(expected_step_s(q, best), q.measured[0].seconds);
}

// Meshes that memory rules out are ruled out by this, most of them.
TEST(Choose, TheLeastMemoryIsNoMoreThanThePredicted) {
  Rng rng(test_seed());
  double closest = 0;
  for (int i = 0; i < 300; ++i) {
    JobShape s = random_shape(rng);
    s.keep_state = pick(rng, 0, 1) == 1;
    const Layout l{.dp = pick(rng, 1, 4),
                   .pp = pick(rng, 1, 3),
                   .tp = pick(rng, 1, 2),
                   .cp = pick(rng, 1, 2)};
    if (!admit(s, l).ok()) continue;
    const auto n = geometry::ParamTable::make(s.model).num_elements();
    const uint64_t least = least_memory(s, l, n);
    const MemoryUse worst = predict_worst_memory(s, l);
    EXPECT_LE(least, worst.weights + worst.gradients + worst.optimizer)
        << l.to_string() << " zero " << s.zero_stage;
    closest = std::max(closest, static_cast<double>(least) /
                                    static_cast<double>(worst.total()));
  }
  EXPECT_GT(closest, 0.5);
}

TEST(Choose, TheMeshIsTheLargestThatAnySearchFinds) {
  const uint64_t seed = test_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Rng rng(seed);
  int placed = 0, refused = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const PlacementRequest q = random_request(rng);
    const auto d = place_mesh(q);
    const int most = most_ranks(q);
    if (!d.ok()) {
      // An error that more slots cannot fix names the degree.
      if (d.status().code() == Code::kExhausted) {
        ASSERT_EQ(most, 0) << d.status().message();
      }
      ++refused;
      continue;
    }
    ++placed;
    ASSERT_EQ(d->layout.world(), most) << d->reason;
    ASSERT_OK(admit(*q.shape, d->layout));
    ASSERT_TRUE(given(q.degrees.dp, d->layout.dp));
    ASSERT_TRUE(given(q.degrees.tp, d->layout.tp));
    ASSERT_TRUE(given(q.degrees.pp, d->layout.pp));
    ASSERT_TRUE(given(q.degrees.cp, d->layout.cp));
    expect_fastest(q, d->layout, [](const Layout&) { return true; });
    if (d->spares > 0) {
      ASSERT_HAS(d->reason, "spare");
      EXPECT_LACKS(d->reason, "()");
    }
  }
  EXPECT_GT(placed, 500);
  EXPECT_GT(refused, 50);
}

// The largest mesh that fits, and of those the fastest: compared with a search
// that rules out nothing without a prediction.
TEST(Choose, LittleMemoryLeavesTheFastestOfTheLargestMeshesThatFit) {
  const uint64_t seed = test_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Rng rng(seed);
  int passed_over = 0, none = 0;
  for (int trial = 0; trial < 400; ++trial) {
    PlacementRequest q = random_request(rng);
    for (WorkerSlots& w : q.workers) {
      w.host = "h";
      w.memory_bytes = uint64_t{1} << 40;
    }
    std::vector<Layout> meshes;
    for_each_mesh(q, [&](const Layout& l) { meshes.push_back(l); });
    if (meshes.empty()) continue;
    // About what one of them needs.
    const Layout& some = meshes[rng() % meshes.size()];
    const double need =
        static_cast<double>(predict_worst_memory(*q.shape, some).total());
    const double share = need / rank_memory(q, some) * pick(rng, 90, 110) / 100;
    for (WorkerSlots& w : q.workers)
      w.memory_bytes =
          static_cast<uint64_t>(share * static_cast<double>(uint64_t{1} << 40));
    const int largest = most_ranks(q);
    const auto fits = [&](const Layout& l) {
      return static_cast<double>(predict_worst_memory(*q.shape, l).total()) <=
             rank_memory(q, l);
    };
    std::erase_if(meshes, [&](const Layout& l) { return !fits(l); });
    const auto d = place_mesh(q);
    ASSERT_EQ(d.ok(), !meshes.empty());
    if (meshes.empty()) {
      ++none;
      continue;
    }
    int most = 0;
    for (const Layout& l : meshes) most = std::max(most, l.world());
    ASSERT_EQ(d->layout.world(), most) << d->reason;
    passed_over += most < largest ? 1 : 0;
    expect_fastest(q, d->layout, fits);
  }
  EXPECT_GT(passed_over, 20);
  EXPECT_GT(none, 20);
}

Layout random_layout(Rng& rng) {
  return {.dp = pick(rng, 1, 4),
          .pp = pick(rng, 1, 3),
          .tp = pick(rng, 1, 3),
          .cp = pick(rng, 1, 3)};
}

TEST(Choose, AnAdmittedMeshHasAScheduleAndAPrediction) {
  const uint64_t seed = test_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Rng rng(seed);
  int admitted = 0;
  for (int trial = 0; trial < 1000; ++trial) {
    const JobShape s = random_shape(rng);
    const Layout l = random_layout(rng);
    if (!admit(s, l).ok()) continue;
    ++admitted;
    const PlacementRequest q{.shape = s};
    const Terms t = predict_step(q, l).terms;
    EXPECT_GT(t.compute(), 0);
    EXPECT_GE(t.exposed(), 0);
    EXPECT_GE(t.bubble, -1e-12);
    EXPECT_TRUE(l.pp > 1 || t.bubble == 0);
    const int z = shard_group_on(s, l);
    EXPECT_EQ(l.dp * l.cp % z, 0);
    uint64_t most = 0;
    for (int rank = 0; rank < l.world(); ++rank)
      most = std::max(most, predict_memory(s, l, rank).total());
    // By the first rank of every stage alone; vocabulary rows that do not
    // divide make others differ by a row.
    const auto worst = static_cast<double>(predict_worst_memory(s, l).total());
    EXPECT_GE(worst, 0.95 * static_cast<double>(most));
  }
  EXPECT_GT(admitted, 200);
}

// What it keeps of one mesh is what the next one needs.
TEST(Choose, MemoryOfManyMeshesIsThatOfEachAlone) {
  const uint64_t seed = test_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Rng rng(seed);
  int compared = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const JobShape s = random_shape(rng);
    MemoryPredictor predictor(s);
    for (int i = 0; i < 20; ++i) {
      const Layout l = random_layout(rng);
      if (!admit(s, l).ok()) continue;
      ++compared;
      EXPECT_EQ(predictor.worst(l), predict_worst_memory(s, l));
    }
  }
  EXPECT_GT(compared, 300);
}

TEST(Choose, AShapeThatNoMeshAdmitsIsAnError) {
  PlacementRequest q;
  q.workers = {{.worker = "a", .host = "h", .slots = 2, .memory_bytes = 1}};
  q.shape = JobShape{.model = geometry::llama(64, 1, 1, 1, 64, 32)};
  q.shape->model.lora.rank = 8;  // without targets
  EXPECT_FALSE(place_mesh(q).ok());
}

PlacementRequest four_slots() {
  PlacementRequest q;
  q.workers = {{.worker = "a", .host = "h", .slots = 2, .cores = 4},
               {.worker = "b", .host = "i", .slots = 2, .cores = 4}};
  q.shape = JobShape{.model = geometry::llama(256, 4, 4, 4, 704, 257),
                     .T = 256,
                     .B = 4,
                     .microbatches = 8};
  q.microbatches = 8;
  return q;
}

// Slots that no mesh can use, however many a worker claims to have, cost no
// search: counting down from them one by one would take hours.
TEST(Choose, SlotsBeyondTheLargestMeshChangeNothing) {
  Rng rng(test_seed());
  for (int i = 0; i < 20; ++i) {
    PlacementRequest q = random_request(rng);
    q.max_slots = -1;
    q.previous.clear();
    q.layouts.clear();
    for (WorkerSlots& w : q.workers) {
      w.slots = 4000;
      w.host = "one";
      w.memory_bytes = 0;
    }
    const auto enough = place_mesh(q);
    for (WorkerSlots& w : q.workers) w.slots = 400'000'000;
    const auto many = place_mesh(q);
    ASSERT_EQ(enough.ok(), many.ok());
    if (!enough.ok()) continue;
    EXPECT_EQ(enough.value().layout.world(), many.value().layout.world());
  }
}

// Gradients of all layers are reduced once a step, tensor-parallel messages
// are exchanged in every layer of every microbatch.
TEST(Choose, DataParallelismWinsWithManyMicrobatchesOnAFastNetwork) {
  PlacementRequest q = four_slots();
  q.core.network_bytes_per_s = 1e10;
  q.microbatches = q.shape->microbatches = 64;
  EXPECT_EQ(place_mesh(q)->layout, (Layout{.dp = 4}));
  // On a slow one tensor-parallel ranks stay inside the hosts, and only their
  // share of the gradients crosses it.
  q.core.network_bytes_per_s = 1e6;
  EXPECT_EQ(place_mesh(q)->layout, (Layout{.dp = 2, .tp = 2}));
}

TEST(Choose, TheModelIsSplitWhereMicrobatchesOrDegreesAskForIt) {
  PlacementRequest q = four_slots();
  // Fewer microbatches than slots: the model's axes take the rest.
  q.microbatches = q.shape->microbatches = 2;
  EXPECT_EQ(place_mesh(q)->layout.world(), 4);
  EXPECT_LE(place_mesh(q)->layout.dp, 2);
  // Degrees given are kept, and what they leave is spare.
  q = four_slots();
  q.degrees = {.dp = -1, .tp = 3, .pp = 1, .cp = 1};
  EXPECT_EQ(place_mesh(q).status().code(), Code::kInvalidArgument);
  EXPECT_SAYS(place_mesh(q), "allowed: 1, 2, 4");
  q.degrees = {.dp = -1, .tp = 1, .pp = 3, .cp = 1};
  EXPECT_EQ(place_mesh(q)->reason,
            "dp1,pp3: 3 of 4 slots on 2 workers, 1 spare (multiples of 3 "
            "slots)");
}

TEST(Choose, AMeshThatDoesNotFitIntoMemoryIsPassedOver) {
  PlacementRequest q = four_slots();
  q.degrees = {.dp = -1, .tp = -1, .pp = 1, .cp = 1};
  const uint64_t dp4 = predict_worst_memory(*q.shape, Layout{.dp = 4}).total();
  const uint64_t tp4 = predict_worst_memory(*q.shape, Layout{.tp = 4}).total();
  ASSERT_LT(tp4, dp4);
  for (WorkerSlots& w : q.workers) w.memory_bytes = 2 * (dp4 - 1);
  EXPECT_GT(place_mesh(q)->layout.tp, 1);
  EXPECT_EQ(place_mesh(q)->layout.world(), 4);
  for (WorkerSlots& w : q.workers) w.memory_bytes = 1 << 20;
  const auto none = place_mesh(q);
  EXPECT_EQ(none.status().code(), Code::kExhausted);
  EXPECT_SAYS(none, "MiB; use more slots");
}

TEST(Choose, AHostWithLittleMemoryKeepsNoOtherFromItsMesh) {
  PlacementRequest q = four_slots();
  q.degrees = {.dp = -1, .tp = 1, .pp = 1, .cp = 1};
  const uint64_t rank = predict_worst_memory(*q.shape, Layout{.dp = 4}).total();
  q.workers = {{.worker = "a", .host = "a-small", .slots = 4, .cores = 4},
               {.worker = "b", .host = "b-large", .slots = 4, .cores = 4}};
  q.workers[1].memory_bytes = 8 * rank;
  for (const auto& layouts :
       {std::vector<Layout>{}, std::vector<Layout>{{.dp = 4}}})
    for (const uint64_t memory : {uint64_t{1} << 20, 2 * rank}) {
      q.layouts = layouts;
      q.workers[0].memory_bytes = memory;
      const auto placed = place_mesh(q);
      ASSERT_TRUE(placed.ok()) << placed.status().message();
      EXPECT_EQ(placed->layout, (Layout{.dp = 4}));
      EXPECT_EQ(placed->spares, 4);
      for (const pb::RankPlace& p : placed->ranks) EXPECT_EQ(p.worker(), "b");
      EXPECT_HAS(placed->reason, "a-small not used: too little memory");
    }
}

// Hosts without ranks neither lend their cores nor slow a step down.
TEST(Choose, OnlyHostsWithRanksCount) {
  PlacementRequest q = four_slots();
  q.workers = {{.worker = "a", .host = "a", .slots = 4, .cores = 4}};
  const double alone = predict_step(q, Layout{.dp = 4}).total_s;
  q.workers.push_back({.worker = "b", .host = "b", .slots = 4, .cores = 8});
  q.workers.back().core = reference_core();
  q.workers.back().core->fp32_flops /= 4;
  q.workers.back().core->flops /= 4;
  EXPECT_EQ(predict_step(q, Layout{.dp = 4}).total_s, alone);
}

TEST(Choose, TheFirstPreferredLayoutForWhichTheSlotsSufficeIsTaken) {
  PlacementRequest q = four_slots();
  q.layouts = {Layout{.dp = 8}, Layout{.dp = 3}, Layout{.tp = 2},
               Layout{.pp = 2}};
  EXPECT_EQ(place_mesh(q)->layout, (Layout{.dp = 3}));
  EXPECT_EQ(place_mesh(q)->spares, 1);
  q.workers.pop_back();
  EXPECT_EQ(place_mesh(q)->layout, (Layout{.tp = 2}));
  q.workers[0].slots = 1;
  EXPECT_EQ(place_mesh(q).status().message(),
            "too few slots: 1 offered (a: 1), needs 2 (the smallest of "
            "elastic.layouts)");
}

TEST(Shape, WhatNoMeshCanRunIsRefusedWithTheReason) {
  JobShape s = *four_slots().shape;
  const auto says = [&](const Layout& l, const std::string& what) {
    const Status status = admit(s, l);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << what;
    EXPECT_SAYS(status, what);
  };
  EXPECT_OK(admit(s, {.dp = 8, .pp = 4, .tp = 4, .cp = 2}));
  says({.dp = 9}, "dp must be 1 to 8");
  says({.pp = 5}, "allowed: 1 to 4");
  says({.cp = 3}, "allowed: a multiple of 6");
  s.schedule = ScheduleKind::kInterleaved1F1B;
  s.chunks = 2;
  EXPECT_OK(admit(s, {.dp = 3}));
  EXPECT_OK(admit(s, {.dp = 4, .pp = 2}));
  says({.pp = 3}, "at most the 4 layers");
  // pp need not divide the microbatches, and dp may split them unevenly.
  EXPECT_OK(admit(s, {.dp = 3, .pp = 2}));
  const Layout uneven{.dp = 3, .pp = 2};
  const int64_t most = most_microbatches(s, uneven);
  EXPECT_EQ(schedule_on(s, uneven, most).num_microbatches, 4);
}

}  // namespace
}  // namespace remesh::planner
