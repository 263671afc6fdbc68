// Which mesh a job should have, and when it changes.
#include <fmt/format.h>

#include <map>

#include "coordinator/core/cordons.h"
#include "coordinator/core/job_shape.h"
#include "coordinator/core/mesh_policy.h"
#include "tests/testing/expect.h"
#include "tests/testing/llama.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

struct Fixture : RosterFixture {
  MeshPolicy policy{small_job(), std::nullopt};
};

class MeshPolicyTest : public testing::Test, protected Fixture {};

int world(const Result<planner::Placement>& placed) {
  return placed.ok() ? placed->layout.world() : 0;
}

TEST_F(MeshPolicyTest, UsesAllSlotsUnlessACommandLimitsThem) {
  hear_all({"a", "b", "c"});
  EXPECT_EQ(world(policy.place(view())), 3);
  durable.mutable_mesh_request()->set_scale(2);
  EXPECT_EQ(world(policy.place(view())), 2);
  durable.clear_mesh_request();
  durable.mutable_mesh_request()->set_pinned("dp1");
  EXPECT_EQ(world(policy.place(view())), 1);
  durable.mutable_mesh_request()->set_pinned("dp4");
  EXPECT_EQ(world(policy.place(view())), 3) << "the pin does not fit";
}

TEST_F(MeshPolicyTest, ARefusedCommandChangesNothing) {
  hear_all({"a", "b"});
  EXPECT_FALSE(policy.pin(view(), "dp4", durable.mutable_mesh_request()).ok());
  EXPECT_FALSE(policy.scale(view(), -1, durable.mutable_mesh_request()).ok());
  EXPECT_FALSE(policy.scale(view(), 0, durable.mutable_mesh_request()).value());
  EXPECT_EQ(durable.mesh_request().ByteSizeLong(), 0U);
  EXPECT_TRUE(policy.scale(view(), 1, durable.mutable_mesh_request()).value());
}

pb::Report of_build(const std::string& worker, const std::string& build) {
  pb::Report r = report(worker, 0);
  r.set_build(build);
  return r;
}

TEST_F(MeshPolicyTest, NeverMixesBuildsAndChoosesTheOneWithTheMostSlots) {
  hear(of_build("a", "1"));
  hear(of_build("b", "2"));
  hear(of_build("c", "2"));
  const auto placed = policy.place(view());
  ASSERT_EQ(world(placed), 2);
  EXPECT_EQ(placed->ranks[0].worker(), "b");
  EXPECT_EQ(placed->ranks[1].worker(), "c");
  const auto old = policy.place_on(view(), "1", {"host-a", "host-b"}, 0);
  ASSERT_TRUE(old);
  ASSERT_EQ(old->ranks.size(), 1U) << "where the state of the older build is";
  EXPECT_EQ(old->ranks[0].worker(), "a");
}

TEST_F(MeshPolicyTest, KeepsTheRunningBuildAmongEqualOnes) {
  for (const char* running_build : {"1", "2"}) {
    Fixture f;
    f.durable.mutable_assignment()->set_build(running_build);
    f.hear(of_build("a", "1"));
    f.hear(of_build("b", "2"));
    const auto placed = f.policy.place(f.view());
    ASSERT_EQ(world(placed), 1);
    EXPECT_EQ(f.policy.builds(f.view(), false).front(), running_build);
    EXPECT_EQ(placed->ranks[0].worker(), *running_build == '1' ? "a" : "b");
  }
}

TEST_F(MeshPolicyTest, WorkersThatLeaveGetNoRanks) {
  hear_all({"a", "b"});
  roster.drain("b");
  const auto placed = policy.place(view());
  ASSERT_EQ(world(placed), 1);
  EXPECT_EQ(placed->ranks[0].worker(), "a");
}

// A model of which a core does `tflops`, on hosts with a slow network.
pb::Report with_hardware(const std::string& worker, double tflops) {
  pb::Report r = report(worker, 0);
  r.set_hardware(fmt::format(
      "[device]\nname = \"core\"\nmemory_gb = 4.0\nmemory_gb_per_s = 10.0\n"
      "peak_tflops = {0}\npeak_fp32_tflops = {0}\n[node]\ndevices = 1\n"
      "gb_per_s = 4.0\n[network]\ngb_per_s = 0.05\n",
      tflops));
  return r;
}
planner::JobShape shape_of_eight_microbatches() {
  planner::JobShape s;
  s.model = geometry::llama(512, 8, 8, 8, 1376, 32000);
  s.T = 256;
  s.microbatches = 8;
  return s;
}

pb::Job any_degrees() {
  pb::Job j = small_job();
  merge_text("tensor_parallel_degree: -1 pipeline_parallel_degree: -1",
             j.mutable_parallel());
  return j;
}

TEST_F(MeshPolicyTest, ChoosesByTheHardwareThatWorkersReport) {
  // Slow cores hide the gradients' way over the network, fast ones do not.
  std::map<double, std::string> meshes;
  for (const double tflops : {0.01, 2.0}) {
    Fixture f;
    f.policy = MeshPolicy(any_degrees(), shape_of_eight_microbatches());
    EXPECT_TRUE(f.policy.wants_hardware());
    for (const char* w : {"a", "b", "c", "d"}) f.hear(with_hardware(w, tflops));
    const auto placed = f.policy.place(f.view());
    ASSERT_EQ(world(placed), 4);
    meshes[tflops] = placed->layout.to_string();
  }
  EXPECT_EQ(meshes[0.01], "dp4");
  EXPECT_NE(meshes[2.0], "dp4");
}

TEST_F(MeshPolicyTest, WaitsBrieflyForTheHardwareOfNewWorkers) {
  pb::Job j = small_job();
  j.mutable_parallel()->set_tensor_parallel_degree(-1);
  policy = MeshPolicy(j, shape_of_eight_microbatches());
  hear(with_hardware("a", 1));
  EXPECT_FALSE(policy.awaits_hardware(view()));
  hear(report("b", 0), 100);
  EXPECT_TRUE(policy.awaits_hardware(view(200)));
  EXPECT_FALSE(policy.awaits_hardware(view(60'000)));
  pb::Report none = report("b", 0);
  none.set_hardware_error("no program");
  hear(none, 300);
  EXPECT_FALSE(policy.awaits_hardware(view(400)));
  EXPECT_FALSE(Fixture().policy.wants_hardware());
}

// A job of one-rank workers that runs on dp4 and would prefer another mesh.
struct Weighing : Fixture {
  explicit Weighing(int64_t steps_left) {
    pb::Job j = any_degrees();
    j.mutable_train()->set_steps(steps_left);
    policy = MeshPolicy(j, shape_of_eight_microbatches());
    for (const char* w : {"a", "b", "c", "d"}) hear(with_hardware(w, 2.0));
    best = policy.place(view())->layout;
    const geometry::Layout dp4{.dp = 4};
    durable = running({"a", "b", "c", "d"});
    *durable.mutable_assignment_job() = j;
    *durable.mutable_assignment()->mutable_mesh() = mesh_of(dp4);
    ran(dp4, 9);
  }
  void ran(const geometry::Layout& l, double step_s) {
    times.begin(l, {"host-a", "host-b", "host-c", "host-d"});
    for (int i = 0; i < 9; ++i) times.add_step(step_s, 0);
  }
  std::string change(int64_t now_ms = 60'000) {
    ClusterView v = view(now_ms);
    v.times = &times;
    const auto c = policy.wanted_change(v, 0);
    return c ? c->why : "";
  }
  StepTimes times;
  geometry::Layout best;
};

TEST_F(MeshPolicyTest, AFasterMeshOfTheSameSizeMustBeWorthThePause) {
  Weighing f(100'000);
  ASSERT_NE(f.best, geometry::Layout{.dp = 4});
  EXPECT_HAS(f.change(), "faster: dp4 -> " + f.best.to_string());
  EXPECT_EQ(Weighing(1).change(), "") << "the job ends soon";
  Weighing fails(1000);
  EXPECT_NE(fails.change(), "");
  for (int i = 0; i < 100'000; ++i) fails.times.add_failure();
  fails.policy =
      MeshPolicy(fails.durable.assignment_job(), shape_of_eight_microbatches());
  EXPECT_EQ(fails.change(), "") << "the next failure comes first";
}

TEST_F(MeshPolicyTest, MeasurementsOverridePredictions) {
  Weighing f(100'000);
  f.ran(f.best, 12);  // slower than dp4, against all expectation
  EXPECT_EQ(f.change(), "");
  ClusterView v = f.view();
  v.times = &f.times;
  EXPECT_EQ(f.policy.place(v)->layout, geometry::Layout{.dp = 4});
  EXPECT_HAS(f.policy.place(v)->prediction, "9 s a step measured before");
}

TEST_F(MeshPolicyTest, AJoinShortlyBeforeTheEndIsNotWorthAPause) {
  for (const int64_t left : {3, 100'000}) {
    Weighing f(left);
    f.ran({.dp = 4}, 0.5);
    for (const char* w : {"e", "f", "g", "h"})
      f.hear(with_hardware(w, 2.0), 1000);
    EXPECT_EQ(f.change().empty(), left == 3) << f.change();
  }
}

// A host that slows the others down is tried, and tried again an hour later.
TEST_F(MeshPolicyTest, ASmallerMeshThatWasFasterIsUsedAgain) {
  Weighing f(1'000'000);
  const std::set<std::string> fast = {"host-b", "host-c"};
  f.times = StepTimes();
  const geometry::Layout dp2{.dp = 2};
  f.times.begin(dp2, fast);
  for (int i = 0; i < 9; ++i) f.times.add_step(1, 1000);
  ClusterView v = f.view(60'000);
  v.times = &f.times;
  EXPECT_EQ(f.policy.place(v)->layout.world(), 4) << "nobody has tried";
  f.ran({.dp = 4}, 1.05);
  EXPECT_EQ(f.policy.place(v)->layout.world(), 4) << "much the same";
  f.ran({.dp = 4}, 2);
  f.ran(f.best, 3);
  const auto placed = f.policy.place(v);
  ASSERT_TRUE(placed.ok());
  EXPECT_EQ(placed->layout, dp2);
  for (const auto& p : placed->ranks)
    EXPECT_TRUE(fast.contains("host-" + p.worker())) << p.worker();
  EXPECT_HAS(placed->reason, "2 spares (dp4 is slower: 2 s a step)");
  EXPECT_HAS(f.change(), "faster: dp4 -> dp2 (1 s a step instead of 2 s");
  // Another request, for more slots than that, is another matter.
  f.durable.mutable_mesh_request()->set_pinned("dp4");
  EXPECT_EQ(f.policy.place(v)->layout, geometry::Layout{.dp = 4});
  f.durable.mutable_mesh_request()->clear_pinned();
  v.now_ms = 3'601'000;
  EXPECT_EQ(f.policy.place(v)->layout.world(), 4);
}

TEST_F(MeshPolicyTest, CordonedHostsGetNoRanks) {
  durable = running({"a"});
  hear_all({"a", "b"});
  cordon({.host = "host-b"}, cause_of("no room there"), 0,
         durable.mutable_host_faults());
  const auto placed = policy.place(view());
  ASSERT_EQ(world(placed), 1);
  EXPECT_EQ(placed->ranks[0].worker(), "a");
  EXPECT_FALSE(policy.wanted_change(view(1000), 0));
  cordon({.host = "host-a"}, cause_of("too"), 0, durable.mutable_host_faults());
  EXPECT_SAYS(policy.place(view()), "host-b (cordoned: no room there)");
}

TEST_F(MeshPolicyTest, ARescueMayUseACordonedHostAFewTimes) {
  hear_all({"a"});
  suspect({.host = "host-a"}, {}, 0, 0, durable.mutable_host_faults());
  cordon({.host = "host-a"}, cause_of("x"), 0, durable.mutable_host_faults());
  EXPECT_TRUE(policy.place_on(view(), "", {"host-a"}, 0));
  for (int i = 1; i < small_job().elastic().max_same_failures(); ++i)
    suspect({.host = "host-a"}, {}, 0, 0, durable.mutable_host_faults());
  cordon({.host = "host-a"}, cause_of("x"), 0, durable.mutable_host_faults());
  EXPECT_FALSE(policy.place_on(view(), "", {"host-a"}, 0)) << "later";
  int64_t waited_ms = 0;
  while (const auto wait_ms = policy.rescue_in_ms(view(), "host-a")) {
    EXPECT_GT(*wait_ms, 0);
    EXPECT_FALSE(policy.place_on(view(*wait_ms - 1), "", {"host-a"}, 0));
    EXPECT_TRUE(policy.place_on(view(*wait_ms), "", {"host-a"}, 0));
    waited_ms += *wait_ms;
    suspect({.host = "host-a"}, {}, 0, 0, durable.mutable_host_faults());
    cordon({.host = "host-a"}, cause_of("x"), 0, durable.mutable_host_faults());
  }
  EXPECT_GE(waited_ms, kRescueMs);
  EXPECT_FALSE(policy.place_on(view(10 * kRescueMs), "", {"host-a"}, 0));
}

TEST_F(MeshPolicyTest, StaysWhereTheNextMeshWouldBe) {
  hear_all({"a", "b", "c"});
  durable.mutable_mesh_request()->set_scale(2);
  planner::Placement there{.layout = {.dp = 2}};
  for (const char* worker : {"b", "c"}) {
    pb::RankPlace& p = there.ranks.emplace_back();
    p.set_rank(static_cast<int>(there.ranks.size()) - 1);
    p.set_worker(worker);
  }
  EXPECT_TRUE(policy.stays_on(view(), there));
  durable.mutable_mesh_request()->set_scale(1);
  EXPECT_FALSE(policy.stays_on(view(), there)) << "a smaller one is wanted";
  durable.mutable_mesh_request()->set_scale(2);
  roster.drain("b");
  EXPECT_FALSE(policy.stays_on(view(), there)) << "b leaves";
}

TEST_F(MeshPolicyTest, WantsALargerMeshAfterTheJoinWindow) {
  durable = running({"a"});
  hear_all({"a"});
  EXPECT_FALSE(policy.wanted_change(view(5000), 0));
  hear_all({"b"}, 5000);
  EXPECT_FALSE(policy.wanted_change(view(5999), 0)) << "more may join";
  const auto change = policy.wanted_change(view(6000), 0);
  ASSERT_TRUE(change);
  EXPECT_FALSE(change->must);
  EXPECT_FALSE(policy.wanted_change(view(6000), 7000)) << "put off";
  ClusterView soon = view(5999);
  soon.joined_by_ms = 4999;
  EXPECT_FALSE(policy.wanted_change(soon, 0)) << "b may be gone soon";
  hear_all({"c"}, 6500);
  ClusterView later = view(6500);
  EXPECT_FALSE(policy.wanted_change(later, 0));
  later.joined_by_ms = 5500;
  EXPECT_TRUE(policy.wanted_change(later, 0)) << "there is always one more";
  EXPECT_EQ(world(policy.place(later)), 2) << "without c";
}

// The disk is full, so that the ranks declined to stop: where each of their
// steps is asked to be the last, each is followed by an attempt to save it.
TEST_F(MeshPolicyTest, AChangeOfTheJobThatWasPutOffIsNotAskedForAgainAtOnce) {
  durable = running({"a", "b", "c"});
  hear_all({"a", "b", "c"});
  *durable.mutable_assignment_job() = small_job();
  durable.mutable_assignment_job()->mutable_train()->set_steps(50);
  EXPECT_FALSE(policy.wanted_change(view(6999), 7000));
  EXPECT_HAS(policy.wanted_change(view(7000), 7000).value().why,
             "job changed: train.steps 50 -> 100");
  durable.clear_assignment_job();
  durable.set_generation(2);
  merge_text("link_search { ends: 'host-a' apart: 'host-a' }",
             durable.mutable_host_faults());
  EXPECT_FALSE(policy.wanted_change(view(6999), 7000));
  EXPECT_TRUE(policy.wanted_change(view(7000), 7000));
}

TEST_F(MeshPolicyTest, MustChangeForAStopAndForALeavingWorkerWithRanks) {
  durable = running({"a", "b"});
  hear_all({"a", "b", "spare"});
  roster.drain("spare");
  EXPECT_FALSE(policy.wanted_change(view(), 0));
  roster.drain("b");
  ASSERT_TRUE(policy.wanted_change(view(), 0));
  EXPECT_TRUE(policy.wanted_change(view(), 0)->must);
  durable.mutable_stop()->set_asked(true);
  EXPECT_EQ(policy.wanted_change(view(), 0)->why, "stop");
}

TEST_F(MeshPolicyTest, RefusesAnImpossibleLayoutOrScale) {
  hear_all({"a", "b"});
  EXPECT_OK(policy.check_layout(view(), {.dp = 2}));
  EXPECT_FALSE(policy.check_layout(view(), {.dp = 3}).ok());
  EXPECT_OK(policy.check_scale(view(), 1));
  durable.mutable_mesh_request()->set_pinned("dp2");
  EXPECT_FALSE(policy.check_scale(view(), 1).ok());
  durable.mutable_mesh_request()->set_scale(1);
  EXPECT_FALSE(policy.check_layout(view(), {.dp = 2}).ok());
}

}  // namespace
}  // namespace remesh::core
