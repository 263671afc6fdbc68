// Decisions about meshes and states: the mesh policy, recovery and retention.
#include <fmt/format.h>

#include <map>

#include "coordinator/core/cordons.h"
#include "coordinator/core/job_shape.h"
#include "coordinator/core/mesh_policy.h"
#include "coordinator/core/recovery.h"
#include "coordinator/core/state_retention.h"
#include "tests/testing/expect.h"
#include "tests/testing/llama.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

struct Fixture : RosterFixture {
  MeshPolicy policy{small_job(), std::nullopt};

  ClusterView view_at(int64_t last_finished, int64_t saved_step) const {
    return {.roster = roster,
            .durable = durable,
            .last_finished = last_finished,
            .saved_step = saved_step};
  }
};

int world(const Result<planner::Placement>& placed) {
  return placed.ok() ? placed->layout.world() : 0;
}

TEST(MeshPolicy, UsesAllSlotsUnlessACommandLimitsThem) {
  Fixture f;
  f.hear_all({"a", "b", "c"});
  EXPECT_EQ(world(f.policy.place(f.view())), 3);
  f.durable.mutable_mesh_request()->set_scale(2);
  EXPECT_EQ(world(f.policy.place(f.view())), 2);
  f.durable.clear_mesh_request();
  f.durable.mutable_mesh_request()->set_pinned("dp1");
  EXPECT_EQ(world(f.policy.place(f.view())), 1);
  f.durable.mutable_mesh_request()->set_pinned("dp4");
  EXPECT_EQ(world(f.policy.place(f.view())), 3) << "the pin does not fit";
}

TEST(MeshPolicy, ARefusedCommandChangesNothing) {
  Fixture f;
  f.hear_all({"a", "b"});
  EXPECT_FALSE(f.policy.pin(f.view(), "dp4", &f.durable).ok());
  EXPECT_FALSE(f.policy.scale(f.view(), -1, &f.durable).ok());
  EXPECT_FALSE(f.policy.scale(f.view(), 0, &f.durable).value());
  EXPECT_FALSE(f.durable.has_mesh_request());
  EXPECT_TRUE(f.policy.scale(f.view(), 1, &f.durable).value());
}

pb::Report of_build(const std::string& worker, const std::string& build) {
  pb::Report r = report(worker, 0);
  r.set_build(build);
  return r;
}

TEST(MeshPolicy, NeverMixesBuildsAndChoosesTheOneWithTheMostSlots) {
  Fixture f;
  f.hear(of_build("a", "1"));
  f.hear(of_build("b", "2"));
  f.hear(of_build("c", "2"));
  const auto placed = f.policy.place(f.view());
  ASSERT_EQ(world(placed), 2);
  EXPECT_EQ(placed->ranks[0].worker(), "b");
  EXPECT_EQ(placed->ranks[1].worker(), "c");
  const auto old = f.policy.place_on(f.view(), "1", {"host-a", "host-b"}, 0);
  ASSERT_TRUE(old);
  ASSERT_EQ(old->ranks.size(), 1U) << "where the state of the older build is";
  EXPECT_EQ(old->ranks[0].worker(), "a");
}

TEST(MeshPolicy, KeepsTheRunningBuildAmongEqualOnes) {
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

TEST(MeshPolicy, WorkersThatLeaveGetNoRanks) {
  Fixture f;
  f.hear_all({"a", "b"});
  f.roster.drain("b");
  const auto placed = f.policy.place(f.view());
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

TEST(MeshPolicy, ChoosesByTheHardwareThatWorkersReport) {
  pb::Job j = small_job();
  j.mutable_parallel()->set_tensor_parallel_degree(-1);
  j.mutable_parallel()->set_pipeline_parallel_degree(-1);
  // Slow cores hide the gradients' way over the network, fast ones do not.
  std::map<double, std::string> meshes;
  for (const double tflops : {0.01, 2.0}) {
    Fixture f;
    f.policy = MeshPolicy(j, shape_of_eight_microbatches());
    EXPECT_TRUE(f.policy.wants_hardware());
    for (const char* w : {"a", "b", "c", "d"}) f.hear(with_hardware(w, tflops));
    const auto placed = f.policy.place(f.view());
    ASSERT_EQ(world(placed), 4);
    meshes[tflops] = placed->layout.to_string();
  }
  EXPECT_EQ(meshes[0.01], "dp4");
  EXPECT_NE(meshes[2.0], "dp4");
}

TEST(MeshPolicy, WaitsBrieflyForTheHardwareOfNewWorkers) {
  pb::Job j = small_job();
  j.mutable_parallel()->set_tensor_parallel_degree(-1);
  Fixture f;
  f.policy = MeshPolicy(j, shape_of_eight_microbatches());
  f.hear(with_hardware("a", 1));
  EXPECT_FALSE(f.policy.awaits_hardware(f.view()));
  f.hear(report("b", 0), 100);
  EXPECT_TRUE(f.policy.awaits_hardware(f.view(200)));
  EXPECT_FALSE(f.policy.awaits_hardware(f.view(60'000)));
  pb::Report none = report("b", 0);
  none.set_hardware_error("no program");
  f.hear(none, 300);
  EXPECT_FALSE(f.policy.awaits_hardware(f.view(400)));
  EXPECT_FALSE(Fixture().policy.wants_hardware());
}

// A job of one-rank workers that runs on dp4 and would prefer another mesh.
struct Weighing : Fixture {
  explicit Weighing(int64_t steps_left) {
    pb::Job j = small_job();
    j.mutable_train()->set_steps(steps_left);
    j.mutable_parallel()->set_tensor_parallel_degree(-1);
    j.mutable_parallel()->set_pipeline_parallel_degree(-1);
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

TEST(MeshPolicy, AFasterMeshOfTheSameSizeMustBeWorthThePause) {
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

TEST(MeshPolicy, MeasurementsOverridePredictions) {
  Weighing f(100'000);
  f.ran(f.best, 12);  // slower than dp4, against all expectation
  EXPECT_EQ(f.change(), "");
  ClusterView v = f.view();
  v.times = &f.times;
  EXPECT_EQ(f.policy.place(v)->layout, geometry::Layout{.dp = 4});
  EXPECT_HAS(f.policy.place(v)->prediction, "9 s a step measured before");
}

TEST(MeshPolicy, AJoinShortlyBeforeTheEndIsNotWorthAPause) {
  for (const int64_t left : {3, 100'000}) {
    Weighing f(left);
    f.ran({.dp = 4}, 0.5);
    f.hear(with_hardware("e", 2.0), 1000);
    f.hear(with_hardware("f", 2.0), 1000);
    f.hear(with_hardware("g", 2.0), 1000);
    f.hear(with_hardware("h", 2.0), 1000);
    EXPECT_EQ(f.change().empty(), left == 3) << f.change();
  }
}

// A host that slows the others down is tried, and tried again an hour later.
TEST(MeshPolicy, ASmallerMeshThatWasFasterIsUsedAgain) {
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

TEST(MeshPolicy, CordonedHostsGetNoRanks) {
  Fixture f;
  f.durable = running({"a"});
  f.hear_all({"a", "b"});
  cordon({.host = "host-b"}, cause_of("no room there"), 0,
         f.durable.mutable_host_faults());
  const auto placed = f.policy.place(f.view());
  ASSERT_EQ(world(placed), 1);
  EXPECT_EQ(placed->ranks[0].worker(), "a");
  EXPECT_FALSE(f.policy.wanted_change(f.view(1000), 0));
  cordon({.host = "host-a"}, cause_of("too"), 0,
         f.durable.mutable_host_faults());
  EXPECT_SAYS(f.policy.place(f.view()), "host-b (cordoned: no room there)");
}

TEST(MeshPolicy, ARescueMayUseACordonedHostAFewTimes) {
  Fixture f;
  f.hear_all({"a"});
  suspect({.host = "host-a"}, {}, 0, 0, f.durable.mutable_host_faults());
  cordon({.host = "host-a"}, cause_of("x"), 0, f.durable.mutable_host_faults());
  EXPECT_TRUE(f.policy.place_on(f.view(), "", {"host-a"}, 0));
  for (int i = 1; i < small_job().elastic().max_same_failures(); ++i)
    suspect({.host = "host-a"}, {}, 0, 0, f.durable.mutable_host_faults());
  cordon({.host = "host-a"}, cause_of("x"), 0, f.durable.mutable_host_faults());
  EXPECT_FALSE(f.policy.place_on(f.view(), "", {"host-a"}, 0)) << "later";
  int64_t waited_ms = 0;
  while (const auto wait_ms = f.policy.rescue_in_ms(f.view(), "host-a")) {
    EXPECT_GT(*wait_ms, 0);
    EXPECT_FALSE(f.policy.place_on(f.view(*wait_ms - 1), "", {"host-a"}, 0));
    EXPECT_TRUE(f.policy.place_on(f.view(*wait_ms), "", {"host-a"}, 0));
    waited_ms += *wait_ms;
    suspect({.host = "host-a"}, {}, 0, 0, f.durable.mutable_host_faults());
    cordon({.host = "host-a"}, cause_of("x"), 0,
           f.durable.mutable_host_faults());
  }
  EXPECT_GE(waited_ms, kRescueMs);
  EXPECT_FALSE(f.policy.place_on(f.view(10 * kRescueMs), "", {"host-a"}, 0));
}

TEST(MeshPolicy, StaysWhereTheNextMeshWouldBe) {
  Fixture f;
  f.hear_all({"a", "b", "c"});
  f.durable.mutable_mesh_request()->set_scale(2);
  planner::Placement there{.layout = {.dp = 2}};
  for (const char* worker : {"b", "c"}) {
    pb::RankPlace& p = there.ranks.emplace_back();
    p.set_rank(static_cast<int>(there.ranks.size()) - 1);
    p.set_worker(worker);
  }
  EXPECT_TRUE(f.policy.stays_on(f.view(), there));
  f.durable.mutable_mesh_request()->set_scale(1);
  EXPECT_FALSE(f.policy.stays_on(f.view(), there)) << "a smaller one is wanted";
  f.durable.mutable_mesh_request()->set_scale(2);
  f.roster.drain("b");
  EXPECT_FALSE(f.policy.stays_on(f.view(), there)) << "b leaves";
}

TEST(MeshPolicy, WantsALargerMeshAfterTheJoinWindow) {
  Fixture f;
  f.durable = running({"a"});
  f.hear_all({"a"});
  EXPECT_FALSE(f.policy.wanted_change(f.view(5000), 0));
  f.hear_all({"b"}, 5000);
  EXPECT_FALSE(f.policy.wanted_change(f.view(5999), 0)) << "more may join";
  const auto change = f.policy.wanted_change(f.view(6000), 0);
  ASSERT_TRUE(change);
  EXPECT_FALSE(change->must);
  EXPECT_FALSE(f.policy.wanted_change(f.view(6000), 7000)) << "put off";
  ClusterView view = f.view(5999);
  view.keeps_joining = true;
  EXPECT_FALSE(f.policy.wanted_change(view, 0)) << "b may be gone soon";
  f.hear_all({"c"}, 6500);
  ClusterView later = f.view(6500);
  EXPECT_FALSE(f.policy.wanted_change(later, 0));
  later.keeps_joining = true;
  EXPECT_TRUE(f.policy.wanted_change(later, 0)) << "there is always one more";
  EXPECT_EQ(world(f.policy.place(later)), 2) << "without c";
}

// The disk is full, so that the ranks declined to stop: where each of their
// steps is asked to be the last, each is followed by an attempt to save it.
TEST(MeshPolicy, AChangeOfTheJobThatWasPutOffIsNotAskedForAgainAtOnce) {
  Fixture f;
  f.durable = running({"a", "b", "c"});
  f.hear_all({"a", "b", "c"});
  *f.durable.mutable_assignment_job() = small_job();
  f.durable.mutable_assignment_job()->mutable_train()->set_steps(50);
  EXPECT_FALSE(f.policy.wanted_change(f.view(6999), 7000));
  EXPECT_HAS(f.policy.wanted_change(f.view(7000), 7000).value().why,
             "job changed: train.steps 50 -> 100");
  f.durable.clear_assignment_job();
  f.durable.set_generation(2);
  f.durable.mutable_host_faults()->mutable_link_search()->add_ends("host-a");
  f.durable.mutable_host_faults()->mutable_link_search()->add_apart("host-a");
  EXPECT_FALSE(f.policy.wanted_change(f.view(6999), 7000));
  EXPECT_TRUE(f.policy.wanted_change(f.view(7000), 7000));
}

TEST(MeshPolicy, MustChangeForAStopAndForALeavingWorkerWithRanks) {
  Fixture f;
  f.durable = running({"a", "b"});
  f.hear_all({"a", "b", "spare"});
  f.roster.drain("spare");
  EXPECT_FALSE(f.policy.wanted_change(f.view(), 0));
  f.roster.drain("b");
  ASSERT_TRUE(f.policy.wanted_change(f.view(), 0));
  EXPECT_TRUE(f.policy.wanted_change(f.view(), 0)->must);
  f.durable.set_stop_requested(true);
  EXPECT_EQ(f.policy.wanted_change(f.view(), 0)->why, "stop");
}

TEST(MeshPolicy, RefusesAnImpossibleLayoutOrScale) {
  Fixture f;
  f.hear_all({"a", "b"});
  EXPECT_OK(f.policy.check_layout(f.view(), {.dp = 2}));
  EXPECT_FALSE(f.policy.check_layout(f.view(), {.dp = 3}).ok());
  EXPECT_OK(f.policy.check_scale(f.view(), 1));
  f.durable.mutable_mesh_request()->set_pinned("dp2");
  EXPECT_FALSE(f.policy.check_scale(f.view(), 1).ok());
  f.durable.mutable_mesh_request()->set_scale(1);
  EXPECT_FALSE(f.policy.check_layout(f.view(), {.dp = 2}).ok());
}

// ---------------------------------------------------------------- recovery

CheckpointInfo saved(int64_t step, int64_t generation = 1) {
  return {.step = step,
          .generation = generation,
          .path = "step-" + std::to_string(step)};
}

Recovery::Decision decide(const Fixture& f, const StepLedger& ledger,
                          const CheckpointsScanned& scan) {
  Recovery recovery(small_job(), std::nullopt);
  const ClusterView view = f.view();
  return recovery.decide({.view = view,
                          .ledger = ledger,
                          .scan = scan,
                          .policy = f.policy,
                          .missing_holders = {}},
                         *f.policy.place(view));
}

TEST(Recovery, RestoresTheNewestCheckpointOfTheJobsOwnBranch) {
  Fixture f;
  f.hear_all({"a"});
  // Generation 2 continued from step 4 without what generation 1 saved later.
  const StepLedger ledger(6, {}, {{1, 1}, {2, 5}});
  const auto d =
      decide(f, ledger, {.valid = {saved(4), saved(8), saved(6, 2)}});
  ASSERT_EQ(d.kind, Recovery::Decision::Kind::kRestore);
  EXPECT_EQ(d.source.path(), "step-6");
  EXPECT_EQ(d.generation, 2);
}

TEST(Recovery, NeverUsesInitialWeightsWhileCheckpointsExist) {
  Fixture f;
  f.hear_all({"a"});
  EXPECT_EQ(decide(f, {}, {}).source.kind(), pb::Source::INIT);
  EXPECT_EQ(decide(f, {}, {.invalid = {"step-5: truncated"}}).kind,
            Recovery::Decision::Kind::kGiveUp);
  f.durable.mutable_refusals()->add_checkpoints("step-5");
  const auto d = decide(f, {}, {.valid = {saved(5)}});
  ASSERT_EQ(d.kind, Recovery::Decision::Kind::kGiveUp);
  EXPECT_HAS(d.why.value(), "step-5: does not load");
}

TEST(Recovery, RefusesAMemorySourceOnlyWhileAllOfItIsThere) {
  Fixture f;
  f.durable = running({"a"});
  pb::Source* source = f.durable.mutable_assignment()->mutable_source();
  source->set_kind(pb::Source::MEMORY);
  source->set_step(3);
  pb::StateHolding* wanted = source->add_states();
  wanted->set_worker("a");
  wanted->set_generation(1);
  wanted->set_step(3);
  wanted->set_rank(0);
  f.hear_all({"a"});
  pb::Refusals refused;
  refuse_source(*source, f.roster, &refused);
  EXPECT_EQ(refused.states_size(), 0) << "the worker lost it";
  pb::Report r = report("a", 0);
  *r.add_holdings() = *wanted;
  f.hear(r);
  refuse_source(*source, f.roster, &refused);
  EXPECT_EQ(refused.states_size(), 1);
  EXPECT_EQ(lost_source(f.view(), false), "");
  EXPECT_TRUE(source_is_there(f.roster, *source));
  f.roster.expire(f.durable, 10, 1000);
  EXPECT_EQ(lost_source(f.view(), true), "a");
  pb::Report restarted = report("a", 0, 2);
  f.hear(restarted);
  EXPECT_EQ(lost_source(f.view(), false), "") << "it may still list the state";
  EXPECT_FALSE(source_is_there(f.roster, *source));
  restarted.set_has_inventory(true);
  f.hear(restarted);
  EXPECT_EQ(lost_source(f.view(), true), "a");
  EXPECT_FALSE(forgive_source(*source, "b", &refused)) << "b had no part of it";
  EXPECT_TRUE(forgive_source(*source, "a", &refused));
  EXPECT_EQ(refused.states_size(), 0);
  EXPECT_FALSE(forgive_source(*source, "a", &refused));
}

TEST(Recovery, WaitsForTheAnswerOfEveryHolderBeforeASourceIsRefused) {
  Fixture f;
  f.durable = running({"a"});
  for (const char* holder : {"a", "b"})
    f.durable.mutable_assignment()->mutable_source()->add_states()->set_worker(
        holder);
  f.hear_all({"a", "b"});
  f.roster.begin_phase();
  pb::Report ended = report("a", 0);
  ended.set_generation(f.durable.generation());
  ended.set_state(pb::Report::QUIESCED);
  f.hear(ended);
  EXPECT_FALSE(holders_answered(f.view())) << "b is silent";
  f.hear(report("b", 0));
  EXPECT_FALSE(holders_answered(f.view())) << "this one may be an old one";
  f.hear(report("b", 0));
  EXPECT_TRUE(holders_answered(f.view()));
  f.roster.begin_phase();
  EXPECT_FALSE(holders_answered(f.view()));
  for (const char* holder : {"a", "b"})
    f.roster.on_disconnect(holder, 0, "revoked");
  f.roster.expire(f.durable, 10, 1000);
  EXPECT_TRUE(holders_answered(f.view())) << "nobody will answer";
}

// --------------------------------------------------------------- retention

TEST(StateRetention, TheSourceIsNeededUntilALaterStepIsCommitted) {
  Fixture f;
  f.durable = running({"a"});
  pb::Source* source = f.durable.mutable_assignment()->mutable_source();
  source->set_kind(pb::Source::MEMORY);
  source->set_step(3);
  source->add_states()->set_worker("b");
  f.hear(running_report("a", 0, 0, 2));
  f.hear(report("b", 0));
  f.roster.drain("b");
  StateRetention retention(small_job().elastic(), /*keeps_state=*/true);
  const auto needs_b = [&] {
    retention.observe(f.view());
    return retention.needs_memory_of(f.view_at(3, -1), f.policy, "b");
  };
  EXPECT_TRUE(needs_b());
  EXPECT_EQ(retention.missing_holders(f.view()), std::set<std::string>{});
  f.hear(running_report("a", 0, 0, 4));
  EXPECT_FALSE(needs_b());
  retention.begin_generation();
  EXPECT_FALSE(StateRetention(small_job().elastic(), false)
                   .needs_memory_of(f.view_at(3, -1), f.policy, "b"));
}

// Another worker's copy of the state is what protects it until then, and a
// worker that was just fenced has not listed its states yet.
TEST(StateRetention, AWorkerWithoutAnInventoryIsNeeded) {
  Fixture f;
  f.durable = running({"a"});
  pb::Source* source = f.durable.mutable_assignment()->mutable_source();
  source->set_kind(pb::Source::MEMORY);
  source->set_step(3);
  source->add_states()->set_worker("a");
  f.hear(running_report("a", 0, 0, 2));
  pb::Report r = report("b", 0);
  r.clear_has_inventory();
  f.hear(r);
  const StateRetention retention(small_job().elastic(), true);
  EXPECT_TRUE(retention.needs_memory_of(f.view_at(3, -1), f.policy, "b"));
  r.set_has_inventory(true);
  f.hear(r);
  EXPECT_FALSE(retention.needs_memory_of(f.view_at(3, -1), f.policy, "b"));
}

// Step 9 may become complete when a missing worker returns.
TEST(StateRetention, AStateNewerThanTheSourceIsNeededUntilAStepIsFinished) {
  Fixture f;
  f.durable = running({"a"});
  pb::Source* source = f.durable.mutable_assignment()->mutable_source();
  source->set_kind(pb::Source::CHECKPOINT);
  source->set_step(3);
  f.hear(running_report("a", 0, 0, 3));
  pb::Report r = report("b", 0);
  r.set_has_inventory(true);
  r.add_holdings()->set_step(3);
  f.hear(r);
  StateRetention retention(small_job().elastic(), true);
  const auto needs_b = [&] {
    retention.observe(f.view());
    return retention.needs_memory_of(f.view_at(3, 3), f.policy, "b");
  };
  EXPECT_FALSE(needs_b());
  r.add_holdings()->set_step(9);
  f.hear(r);
  EXPECT_TRUE(needs_b());
  f.hear(running_report("a", 0, 0, 4));
  EXPECT_FALSE(needs_b());
}

// The numbers of the last steps are heard late, or never.
TEST(StateRetention, AStateBeyondTheKnownStepsIsNeeded) {
  Fixture f;
  f.durable.set_phase(pb::Durable::WAITING);
  pb::Report r = report("a", 0);
  r.set_has_inventory(true);
  r.add_holdings()->set_step(9);
  f.hear(r);
  const StateRetention retention(small_job().elastic(), true);
  EXPECT_TRUE(retention.needs_memory_of(f.view_at(3, 5), f.policy, "a"));
  EXPECT_FALSE(retention.needs_memory_of(f.view_at(3, 9), f.policy, "a"));
}

// After steps were lost nobody has the last finished one.
TEST(StateRetention, LostStepsAreNotUnsaved) {
  Fixture f;
  f.durable.set_phase(pb::Durable::WAITING);
  pb::Report r = report("a", 0);
  r.set_has_inventory(true);
  r.add_holdings()->set_step(92);
  r.add_holdings()->set_step(93);
  f.hear(r);
  const StateRetention retention(small_job().elastic(), true);
  EXPECT_FALSE(retention.must_save_before_stop(f.view_at(190, 93), f.policy));
  EXPECT_FALSE(retention.needs_memory_of(f.view_at(190, 93), f.policy, "a"));
  EXPECT_EQ(retention.only_in_memory(f.view_at(190, 93)), "");
  EXPECT_TRUE(retention.must_save_before_stop(f.view_at(190, 92), f.policy));
  EXPECT_TRUE(retention.needs_memory_of(f.view_at(190, 92), f.policy, "a"));
  EXPECT_EQ(retention.only_in_memory(f.view_at(190, 92)),
            "step 93 is in no checkpoint, but in the memory of a");
}

TEST(StateRetention, AStopSavesStepsThatAreInMemoryOnly) {
  Fixture f;
  pb::Report r = report("a", 0);
  r.add_holdings()->set_step(9);
  f.hear(r);
  const StateRetention retention(small_job().elastic(), true);
  EXPECT_TRUE(retention.must_save_before_stop(f.view_at(9, 5), f.policy));
  EXPECT_FALSE(retention.must_save_before_stop(f.view_at(9, 9), f.policy));
}

// The daemon that holds the last steps is restarted, or the coordinator.
TEST(StateRetention, AStopWaitsForThoseWhoHoldStepsThatAreNotSaved) {
  Fixture f;
  f.durable = running({"a"}, pb::Durable::WAITING);
  const StateRetention retention(small_job().elastic(), true);
  ClusterView v = f.view_at(9, 5);
  const auto must_save = [&] {
    return retention.must_save_before_stop(v, f.policy);
  };
  v.now_ms = small_job().elastic().rejoin_wait_ms() - 1;
  EXPECT_FALSE(must_save());
  EXPECT_TRUE(retention.awaits_unsaved_steps(v));
  v.now_ms += 1;
  EXPECT_FALSE(retention.awaits_unsaved_steps(v)) << "it does not return";
  pb::Report r = report("a", 0);
  f.hear(r);
  EXPECT_TRUE(must_save()) << "it has not said what it holds";
  r.set_has_inventory(true);
  r.add_holdings()->set_step(9);
  f.hear(r);
  EXPECT_TRUE(must_save());
  r.mutable_holdings(0)->set_step(5);
  f.hear(r);
  v.now_ms = 0;
  EXPECT_FALSE(must_save());
  EXPECT_FALSE(retention.awaits_unsaved_steps(v)) << "it has lost them";
}

}  // namespace
}  // namespace remesh::core
