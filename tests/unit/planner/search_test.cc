// The search, compared with one that simulates every plan.
#include "parallel/planner/search.h"

#include <algorithm>
#include <map>

#include "parallel/geometry/mesh_check.h"
#include "tests/testing/expect.h"
#include "tests/unit/planner/round_machine.h"

namespace remesh::planner {
namespace {

using geometry::Layout;
using geometry::Recompute;
using geometry::ScheduleKind;

SearchRequest request(int64_t devices, int64_t global_batch) {
  SearchRequest q;
  q.machine = round_machine();
  q.model = gpt(1).model;
  q.T = 2048;
  q.global_batch = global_batch;
  q.devices = devices;
  q.run = {.overlap_pipeline = true};
  q.most = 1000;
  return q;
}

// The least time of each mesh, by all combinations of everything.
std::map<std::string, double> brute_force(const SearchRequest& q) {
  std::map<std::string, double> best;
  const auto n = static_cast<int>(q.devices);
  const auto each_mesh = [&](const auto& f) {
    for (int tp = 1; tp <= 8; tp *= 2)
      for (int pp = 1; pp <= n; ++pp)
        for (int cp = 1; cp <= n; ++cp)
          for (int dp = 1; dp <= n; ++dp)
            if (tp * pp * cp * dp == n)
              f(Layout{.dp = dp, .pp = pp, .tp = tp, .cp = cp});
  };
  const auto each_schedule = [](int pp, int64_t layers, bool whole,
                                const auto& f) {
    f(ScheduleKind::k1F1B, 1);
    if (pp == 1) return;
    f(ScheduleKind::kZbH1, 1);
    if (!whole) return;
    for (int v = 2; v <= 16 && v * pp <= layers; ++v)
      f(ScheduleKind::kInterleaved1F1B, v);
  };
  each_mesh([&](const Layout& l) {
    JobShape s;
    s.model = q.model;
    s.model.arch = "llama";
    if (!geometry::check_mesh(s.model, q.T, q.global_batch, 1, l).ok()) return;
    s.model = q.model;
    s.T = q.T;
    s.bf16 = true;
    for (s.B = 1; s.B * l.dp <= q.global_batch; ++s.B) {
      if (q.global_batch % s.B != 0) continue;
      s.microbatches = q.global_batch / s.B;
      const bool whole = s.microbatches % (l.dp * l.pp) == 0;
      each_schedule(
          l.pp, q.model.n_layers, whole, [&](ScheduleKind kind, int v) {
            s.schedule = kind;
            s.chunks = v;
            for (s.zero_stage = 0; s.zero_stage <= 3; ++s.zero_stage)
              for (const int group : {0, 2, 4, 8, 16}) {
                const int ranks = l.dp * l.cp;
                const int node = std::max(2, 8 / l.tp);
                if (group > 0 && (group >= ranks || ranks % group != 0 ||
                                  (group != node && group != 4 * node)))
                  continue;
                s.shard_group = group;
                for (const Recompute r :
                     {Recompute::kNone, Recompute::kSelective,
                      Recompute::kFull}) {
                  s.recompute = r;
                  const Plan p = predict_plan(q, s, l).value();
                  if (static_cast<double>(p.memory.total()) >
                      kUsable * q.machine.memory_bytes)
                    continue;
                  const auto [it, is_new] =
                      best.emplace(l.to_string(), p.cost.total_s);
                  it->second = std::min(it->second, p.cost.total_s);
                }
              }
          });
    }
  });
  return best;
}

void expect_same(const SearchRequest& q) {
  const SearchResult found = search_layouts(q).value();
  const std::map<std::string, double> all = brute_force(q);
  ASSERT_EQ(found.plans.size(), std::min(q.most, all.size()));
  std::vector<double> times;
  for (const auto& [mesh, seconds] : all) times.push_back(seconds);
  std::sort(times.begin(), times.end());
  for (size_t i = 0; i < found.plans.size(); ++i) {
    const Plan& p = found.plans[i];
    EXPECT_NEAR(p.cost.total_s, all.at(p.layout.to_string()), 1e-9)
        << p.settings();
    EXPECT_NEAR(p.cost.total_s, times[i], 1e-9) << p.settings();
  }
  EXPECT_LE(found.simulated, found.fitting);
  EXPECT_LE(found.fitting, found.considered);
}

TEST(Search, FindsWhatBruteForceFinds) {
  for (const int64_t devices : {1, 6, 8, 16}) {
    SCOPED_TRACE(devices);
    SearchRequest q = request(devices, 16);
    q.machine.memory_bytes = devices == 1 ? 400e9 : 80e9;
    expect_same(q);
    q.most = 3;  // most plans are not simulated
    expect_same(q);
  }
}

TEST(Search, FindsItWhereMemoryIsScarceOrTheBatchUneven) {
  SearchRequest q = request(16, 24);
  q.machine.memory_bytes = 22e9;
  q.model.n_layers = 31;
  expect_same(q);
  q.most = 2;
  expect_same(q);
}

TEST(Search, SimulatesFewPlans) {
  SearchRequest q = request(256, 256);
  q.most = 10;
  const SearchResult r = search_layouts(q).value();
  EXPECT_EQ(r.plans.size(), 10u);
  EXPECT_LT(r.simulated * 20, r.fitting);
}

TEST(Search, KeepsToTheLimits) {
  SearchRequest q = request(16, 32);
  q.limits = {.degrees = {.tp = 2, .pp = 4},
              .B = 2,
              .zero_stage = 1,
              .schedule = ScheduleKind::kZbH1,
              .recompute = Recompute::kFull};
  const SearchResult r = search_layouts(q).value();
  ASSERT_EQ(r.plans.size(), 2u);  // with and without context parallelism
  for (const Plan& p : r.plans) {
    EXPECT_EQ(p.layout.tp, 2);
    EXPECT_EQ(p.layout.pp, 4);
    EXPECT_EQ(p.shape.B, 2);
    EXPECT_EQ(p.shape.zero_stage, 1);
    EXPECT_EQ(p.shape.schedule, ScheduleKind::kZbH1);
    EXPECT_EQ(p.shape.recompute, Recompute::kFull);
  }
}

TEST(Search, TensorParallelismLeavesTheNodeOnlyIfAllowed) {
  SearchRequest q = request(32, 32);
  const auto widest = [&] {
    int tp = 0;
    const SearchResult r = search_layouts(q).value();
    for (const Plan& p : r.plans) tp = std::max(tp, p.layout.tp);
    return tp;
  };
  EXPECT_EQ(widest(), 8);
  q.limits.tensor_across_nodes = true;
  EXPECT_EQ(widest(), 32);
}

TEST(Search, ErrorsNameTheValueAndWhatIsAllowed) {
  const auto problem = [](const SearchRequest& q) {
    return search_layouts(q).status();
  };
  EXPECT_EQ(problem(request(0, 8)).message(),
            "0 devices: must be from 1 to 1048576");
  SearchRequest q = request(8, 8);
  q.limits.degrees.tp = 3;
  EXPECT_EQ(problem(q).message(),
            "no mesh of 8 devices can train the model: no product of the given "
            "degrees is that number");
  q = request(7, 3);
  q.model.n_layers = 6;
  EXPECT_SAYS(problem(q), "a step has 3; dp must be 1 to 3");
  q = request(8, 8);
  q.machine.memory_bytes = 8e9;
  EXPECT_EQ(problem(q).code(), Code::kExhausted);
  EXPECT_SAYS(problem(q), "and may use 7.2 of its 8.0 GB; use more devices");
  q.T = 2049;
  EXPECT_SAYS(problem(q), "; use more devices");
  q.T = 1'000'001;
  q.model.n_heads = q.model.n_kv_heads = 1;
  q.machine.memory_bytes = 141e9;
  EXPECT_SAYS(problem(q),
              "; with sequences of 1000016 tokens, which can be "
              "divided, it fits");
  q = request(8, 8);
  q.machine.memory_bytes = 8e9;
  q.limits.B = 1;
  EXPECT_SAYS(problem(q), "no mesh of 8 devices with the given options: ");
  EXPECT_TRUE(problem(q).message().ends_with("of its 8.0 GB"));
  q = request(48, 48);
  q.limits.degrees.tp = 48;
  q.limits.tensor_across_nodes = true;
  q.model.n_heads = 32;
  EXPECT_EQ(problem(q).message(),
            "no mesh of 48 devices can train the model: tp 48: the model has "
            "32 heads");
}

TEST(Search, OptionsThatRuleOutEveryPlanAreNamed) {
  SearchRequest q = request(4, 8);
  q.limits.degrees = {.dp = 4, .tp = 1, .pp = 1, .cp = 1};
  q.limits.B = 8;
  for (const int zero : {-1, 2}) {
    q.limits.zero_stage = zero;
    EXPECT_EQ(search_layouts(q).status().message(),
              "no mesh of 4 devices can be planned: dp4: a micro-batch of 8 is "
              "more than the 2 sequences of a data-parallel rank");
  }
  q = request(4, 6);
  q.limits.degrees = {.dp = 1, .tp = 1, .pp = 4, .cp = 1};
  q.limits.schedule = ScheduleKind::kInterleaved1F1B;
  EXPECT_EQ(search_layouts(q).status().message(),
            "no mesh of 4 devices can be planned: dp1,pp4: an interleaved "
            "pipeline needs a multiple of dp x pp = 4 as microbatches, not 6");
}

TEST(Search, APlanThatCannotRunIsAnError) {
  const auto problem = [](int64_t devices, const Layout& l) {
    return predict_plan(request(devices, 8), gpt(8), l).status().message();
  };
  EXPECT_EQ(problem(16, {.tp = 16}), "");
  EXPECT_EQ(problem(8, {.dp = 16}), "dp16: has 16 devices instead of 8");
  EXPECT_HAS(problem(3, {.tp = 3}), "must divide the 8 devices of a node");
}

}  // namespace
}  // namespace remesh::planner
