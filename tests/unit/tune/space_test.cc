#include "parallel/tune/space.h"

#include <set>

#include "parallel/planner/memory.h"
#include "tests/testing/expect.h"

namespace remesh::tune {
namespace {

SpaceRequest request(int workers, int cores) {
  SpaceRequest r;
  planner::JobShape s;
  s.model.dim = 64;
  s.model.n_layers = 4;
  s.model.n_heads = 4;
  s.model.n_kv_heads = 4;
  s.model.hidden_dim = 192;
  s.model.vocab_size = 256;
  s.T = 64;
  s.B = 4;
  s.microbatches = 4;
  r.place.shape = s;
  r.place.microbatches = s.microbatches;
  r.place.degrees = {.dp = -1, .tp = 1, .pp = 1, .cp = 1};
  for (int i = 0; i < workers; ++i)
    r.place.workers.push_back({.worker = "w" + std::to_string(i),
                               .host = "h",
                               .slots = 1,
                               .cores = cores});
  return r;
}

TEST(Space, HasTheJobsOwnSettingAndOnlyWhatTheJobAdmits) {
  const SpaceRequest r = request(4, 8);
  ASSERT_OK_AND(const auto space, make_space(r));
  ASSERT_EQ(space.settings.size(), space.candidates.size());
  const Setting& own = space.settings[space.own];
  EXPECT_EQ(own.layout.to_string(), "dp4");
  EXPECT_EQ(own.B, 4);
  EXPECT_EQ(own.threads, 2);
  std::set<std::string> texts, meshes;
  for (const Setting& s : space.settings) {
    planner::JobShape shape = *r.place.shape;
    shape.B = s.B;
    shape.microbatches = 16 / s.B;
    shape.zero_stage = s.zero_stage;
    shape.recompute = s.recompute;
    EXPECT_OK(planner::admit(shape, s.layout)) << s.text();
    EXPECT_EQ(4 % s.layout.world(), 0) << s.text();
    EXPECT_GE(8 / s.layout.world(), s.threads) << s.text();
    EXPECT_TRUE(texts.insert(s.text()).second) << s.text();
    meshes.insert(s.layout.to_string());
  }
  for (const char* mesh :
       {"dp1", "dp2,tp2", "dp1,pp4", "dp1,pp2,tp2", "dp2,cp2"})
    EXPECT_TRUE(meshes.contains(mesh)) << mesh;
}

// Ranks fill one host after the other.
TEST(Space, ThreadsAreThoseOfTheRanksOfAHost) {
  SpaceRequest r = request(4, 8);
  int host = 0;
  for (planner::WorkerSlots& w : r.place.workers) {
    w.host = "h" + std::to_string(host++);
    w.slots = 2;
  }
  ASSERT_OK_AND(const auto space, make_space(r));
  for (const Setting& s : space.settings)
    EXPECT_LE(s.threads, s.layout.world() == 1 ? 8 : 4) << s.text();
}

TEST(Space, ALargeMicroBatchOfTheJobIsOneOfThem) {
  SpaceRequest r = request(1, 1);
  r.place.shape->B = 100;
  r.fixed = {"micro-batch"};
  ASSERT_OK_AND(const auto space, make_space(r));
  EXPECT_GT(space.settings.size(), 1U);
}

TEST(Space, AFixedKnobKeepsTheJobsValue) {
  SpaceRequest r = request(4, 8);
  r.fixed = {"tp", "micro-batch", "zero"};
  ASSERT_OK_AND(const auto space, make_space(r));
  std::set<int> pipelines;
  for (const Setting& s : space.settings) {
    EXPECT_EQ(s.layout.tp, 1);
    EXPECT_EQ(s.B, 4);
    EXPECT_EQ(s.zero_stage, 0);
    pipelines.insert(s.layout.pp);
  }
  EXPECT_GT(pipelines.size(), 1U);
  r.fixed = {"speed"};
  EXPECT_EQ(make_space(r).status().message(),
            "'speed' is no knob; there are ranks, tp, pp, cp, micro-batch, "
            "recompute, zero, threads");
}

TEST(Space, WhatDoesNotFitIntoMemoryIsLeftOut) {
  SpaceRequest r = request(4, 8);
  constexpr uint64_t kHost = 12 << 20;
  for (planner::WorkerSlots& w : r.place.workers) w.memory_bytes = kHost;
  ASSERT_OK_AND(const auto space, make_space(r));
  EXPECT_GT(space.too_large, 0U);
  EXPECT_GT(space.settings.size(), 10U);
  for (const Setting& s : space.settings) {
    planner::JobShape shape = *r.place.shape;
    shape.B = s.B;
    shape.microbatches = 16 / s.B;
    shape.zero_stage = s.zero_stage;
    shape.recompute = s.recompute;
    EXPECT_LE(predict_worst_memory(shape, s.layout).total() *
                  static_cast<uint64_t>(s.layout.world()),
              kHost)
        << s.text();
  }
}

TEST(Space, FewerThreadsThanCoresArePredictedSlower) {
  ASSERT_OK_AND(const auto space, make_space(request(1, 8)));
  const Setting own = space.settings[space.own];
  EXPECT_EQ(own.threads, 8);
  for (size_t i = 0; i < space.settings.size(); ++i) {
    Setting s = space.settings[i];
    if (s.threads != 4) continue;
    s.threads = 8;
    const auto same =
        std::find(space.settings.begin(), space.settings.end(), s);
    ASSERT_NE(same, space.settings.end());
    EXPECT_GT(
        space.candidates[i].predicted_s,
        space.candidates[static_cast<size_t>(same - space.settings.begin())]
            .predicted_s);
  }
}

}  // namespace
}  // namespace remesh::tune
