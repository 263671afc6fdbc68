// Which state a generation starts from: when the newest one is in the memory of
// workers, from there, after a wait for one that may return, or through a
// rescue; otherwise from a checkpoint.
#include "coordinator/core/recovery.h"

#include <set>
#include <string>

#include "coordinator/core/assignment.h"
#include "coordinator/core/cordons.h"
#include "coordinator/core/state_retention.h"
#include "parallel/geometry/param_table.h"
#include "parallel/geometry/schedule.h"
#include "proto/limits/plausible.h"
#include "tests/testing/expect.h"
#include "tests/testing/pieces.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

using Kind = Recovery::Decision::Kind;

// Generation 1 ran on dp2 with ZeRO 1: workers a and b have half of the state
// each. Step 10 is the last finished one, step 5 is in a checkpoint.
class MemoryRecovery : public ::testing::Test, protected RosterFixture {
 protected:
  MemoryRecovery() {
    durable = running({"a", "b"}, pb::Durable::WAITING);
    for (int64_t step = 1; step <= 10; ++step) {
      auto m = text_message<pb::StepMetrics>("generation: 1");
      m.set_step(step);
      ledger_.report(m);
    }
    ledger_.advance(1, 10);
    scan_.valid.push_back({.step = 5, .generation = 1, .path = "step-5"});
  }

  // The worker reports that it has that rank's state of that step.
  void holds(const std::string& worker, int rank, int64_t generation = 1,
             int64_t step = 10) {
    pb::Report r = report(worker, 0);
    r.set_has_inventory(true);
    pb::StateHolding* h = r.add_holdings();
    geometry::Sharding sharding{.layout = {.dp = 2}, .zero = {.stage = 1}};
    sharding.bounds = {0, 2};
    const auto shard = geometry::make_rank_shard(table_, sharding, rank);
    h->set_step(step);
    h->set_generation(generation);
    h->set_rank(rank);
    merge_text("mesh { dp: 2 } bounds: [0, 2] zero_stage: 1",
               h->mutable_sharding());
    h->set_model(geometry::model_id(table_));
    h->set_elements(shard->zero.state_elements());
    h->set_segment("segment-" + std::to_string(rank));
    hear(r);
  }

  void hold_all() {
    holds("a", 0);
    holds("b", 1);
  }

  static void expect_rescue(const Recovery::Decision& d) {
    ASSERT_EQ(d.kind, Kind::kRestore);
    EXPECT_TRUE(d.rescue);
    EXPECT_EQ(d.source.step(), 10);
  }

  Recovery::Decision decide(const std::set<std::string>& missing = {},
                            int64_t now_ms = 100) {
    const ClusterView v = view(now_ms);
    const auto wanted = policy_.place(v);
    EXPECT_OK(wanted);
    return recovery_.decide({.view = v,
                             .ledger = ledger_,
                             .scan = scan_,
                             .policy = policy_,
                             .missing_holders = missing},
                            *wanted);
  }

  geometry::ParamTable table_ = small_model();
  StepLedger ledger_;
  CheckpointsScanned scan_;
  MeshPolicy policy_{small_job(), std::nullopt};
  Recovery recovery_{small_job(), small_model()};
};

TEST_F(MemoryRecovery, TheNewestStepComesFromMemory) {
  hold_all();
  const Recovery::Decision d = decide();
  ASSERT_EQ(d.kind, Kind::kRestore);
  EXPECT_EQ(d.source.kind(), pb::Source::MEMORY);
  EXPECT_EQ(d.source.step(), 10);
  ASSERT_EQ(d.source.states_size(), 2);
  EXPECT_EQ(d.source.states(1).worker(), "b");
  EXPECT_EQ(d.generation, 1);
  EXPECT_FALSE(d.rescue);
}

TEST_F(MemoryRecovery, AWorkerWithFinishedStepsIsWaitedForAndThenNot) {
  holds("a", 0);
  const Recovery::Decision first = decide({"b"});
  ASSERT_EQ(first.kind, Kind::kWait);
  EXPECT_HAS(first.why.value(), "the memory of b");
  EXPECT_TRUE(recovery_.waiting(view(200), {"b"}));
  EXPECT_FALSE(recovery_.waiting(view(200), {})) << "nobody is missing now";
  const Recovery::Decision again = decide({"b"}, 200);
  EXPECT_EQ(again.kind, Kind::kWait);
  EXPECT_FALSE(again.why) << "announced before";
  const int64_t over_ms = small_job().elastic().rejoin_wait_ms() + 1;
  EXPECT_FALSE(recovery_.waiting(view(over_ms), {"b"}));
  const Recovery::Decision late = decide({"b"}, over_ms);
  ASSERT_EQ(late.kind, Kind::kRestore);
  EXPECT_EQ(late.source.path(), "step-5");
}

// The storage returns an error, which is no damage.
TEST_F(MemoryRecovery, ACheckpointThatCannotBeReadIsWaitedForAndThenNot) {
  holds("a", 0);  // incomplete
  constexpr int64_t kMinute = 60'000;
  const std::string why = "step-8: Input/output error";
  scan_.invalid.push_back(
      {.step = 8, .path = "step-8", .code = Code::kIo, .why = why});
  const Recovery::Decision first = decide();
  ASSERT_EQ(first.kind, Kind::kWait);
  EXPECT_HAS(first.why.value(), why + "; looking again for up to 10 minutes");
  const Recovery::Decision again = decide({}, 10 * kMinute);
  EXPECT_EQ(again.kind, Kind::kWait);
  EXPECT_FALSE(again.why) << "announced before";
  const Recovery::Decision late = decide({}, 10 * kMinute + 100);
  ASSERT_EQ(late.kind, Kind::kRestore);
  EXPECT_EQ(late.source.path(), "step-5");

  recovery_.begin_generation();
  for (const auto& [step, code] :
       {std::pair{8, Code::kCorrupt}, {8, Code::kNotFound}, {4, Code::kIo}}) {
    scan_.invalid[0].step = step;
    scan_.invalid[0].code = code;
    EXPECT_EQ(decide().kind, Kind::kRestore);
  }
  // On an abandoned branch, of which nothing is finished.
  scan_.invalid[0].step = 11;
  EXPECT_EQ(decide().kind, Kind::kRestore);
  scan_.invalid[0].step = 8;
  hold_all();
  EXPECT_EQ(decide().kind, Kind::kRestore) << "from memory";
}

TEST_F(MemoryRecovery, WithoutAReadableCheckpointItWaitsWithoutEnd) {
  hear(report("a", 0));
  scan_.invalid.push_back({.step = 5,
                           .path = "step-5",
                           .code = Code::kDenied,
                           .why = "step-5: Permission denied"});
  scan_.valid.clear();
  const Recovery::Decision first = decide();
  ASSERT_EQ(first.kind, Kind::kWait);
  EXPECT_HAS(first.why.value(), "looking again until it can be read");
  EXPECT_EQ(decide({}, 1'000'000'000).kind, Kind::kWait);
  scan_.invalid[0].code = Code::kCorrupt;
  EXPECT_EQ(decide().kind, Kind::kGiveUp);
}

// The coordinator was stopped, or its disk full, and then all were killed.
TEST_F(MemoryRecovery, OnlyAFewStepsWithoutMetricsAreMadeAgain) {
  scan_.valid.push_back({.step = 10, .generation = 1, .path = "step-10"});
  const auto source_at = [&](int64_t step) {
    holds("a", 0, 1, step);
    holds("b", 1, 1, step);
    return decide().source;
  };
  EXPECT_EQ(source_at(12).path(), "step-10");
  scan_.valid.push_back({.step = 11, .generation = 1, .path = "step-11"});
  EXPECT_EQ(source_at(12).step(), 12) << "step 11 is finished: it is saved";
  scan_.valid.pop_back();
  EXPECT_EQ(source_at(13).kind(), pb::Source::MEMORY);
  EXPECT_EQ(source_at(13).step(), 13);
  scan_.valid.push_back({.step = 40, .generation = 1, .path = "step-40"});
  EXPECT_EQ(source_at(13).path(), "step-40");
}

// A generation that only saved made no step.
TEST(NewestGeneration, IsAlsoThatOfACheckpointWithoutMetrics) {
  const CheckpointsScanned scan{
      .valid = {{.step = 300, .generation = 4, .path = "step-300"}}};
  EXPECT_EQ(newest_generation(scan, 1), 4);
}

TEST(NewestGeneration, IsNoNumberThatNobodyCanHaveUsed) {
  CheckpointsScanned scan;
  scan.claimed = limits::kMaxNumber;
  EXPECT_EQ(newest_generation(scan, 7), limits::kMaxNumber);
  scan.claimed = limits::kMaxNumber + 1;
  EXPECT_EQ(newest_generation(scan, 7), 7);
}

TEST_F(MemoryRecovery, OtherLossesDoNotProlongTheWait) {
  holds("a", 0);
  ASSERT_EQ(decide({"b"}).kind, Kind::kWait);
  const int64_t until_ms = small_job().elastic().rejoin_wait_ms();
  hear_all({"c"}, until_ms - 1);
  roster.on_disconnect("c", 0, "revoked");
  roster.expire(durable, /*dead_after_ms=*/60'000, until_ms - 1);
  ASSERT_EQ(roster.last_lost_ms(), until_ms - 1);
  EXPECT_FALSE(recovery_.waiting(view(until_ms + 1), {"b"}));
  EXPECT_EQ(decide({"b"}, until_ms + 1).kind, Kind::kRestore);
  // One more that has a part has its time, too.
  EXPECT_EQ(decide({"b", "c"}, until_ms + 1).kind, Kind::kWait);
}

// b is gone for good, and the link to a comes and goes.
TEST_F(MemoryRecovery, AHolderThatIsLostAgainAndAgainProlongsTheWaitOnce) {
  holds("a", 0);
  hear_all({"c"});
  const int64_t wait_ms = small_job().elastic().rejoin_wait_ms();
  ASSERT_EQ(decide({"b"}).kind, Kind::kWait);
  Kind kind = Kind::kWait;
  int64_t now_ms = 0;
  while (kind == Kind::kWait && now_ms < 10 * wait_ms) {
    now_ms += wait_ms / 2;
    roster.on_disconnect("a", now_ms, "silent");
    roster.expire(durable, /*dead_after_ms=*/600'000, now_ms);
    ASSERT_EQ(roster.last_lost_ms(), now_ms);
    kind = decide({"a", "b"}, now_ms).kind;
    if (kind != Kind::kWait) break;
    hear(report("a", 0), now_ms);
    kind = decide({"b"}, now_ms).kind;
  }
  EXPECT_EQ(now_ms, 3 * wait_ms / 2) << "half of it for b, then all of it";
}

// Workers cannot return to a coordinator that hears nobody.
TEST_F(MemoryRecovery, TheWaitLastsAsLongAsTheCoordinatorCanHear) {
  holds("a", 0);
  const int64_t wait_ms = small_job().elastic().rejoin_wait_ms();
  ASSERT_EQ(decide({"b"}).kind, Kind::kWait);
  roster.on_own_absence(wait_ms);
  EXPECT_TRUE(recovery_.waiting(view(2 * wait_ms - 1), {"b"}));
  EXPECT_EQ(decide({"b"}, 2 * wait_ms - 1).kind, Kind::kWait);
  EXPECT_FALSE(recovery_.waiting(view(2 * wait_ms), {"b"}));
  // The wait for others that were lost before begins as late.
  EXPECT_EQ(decide({"b", "c"}, 2 * wait_ms - 1).kind, Kind::kWait);
  EXPECT_EQ(decide({"b", "c"}, 2 * wait_ms).kind, Kind::kRestore);
}

// Generation 2 restored step 10 of generation 1, and ended before a step.
TEST_F(MemoryRecovery, ARestoredStepStaysThatOfTheGenerationThatMadeIt) {
  Recovery::Decision d;
  d.source.set_kind(pb::Source::MEMORY);
  d.source.set_step(10);
  d.generation = 1;
  const auto made_by = [&] {
    return make_plan(d, {.view = view(0),
                         .options = Options(),
                         .shape = std::nullopt,
                         .policy = policy_})
        .assignment.source()
        .made_by();
  };
  EXPECT_EQ(made_by(), 1);
  pb::Assignment* a = durable.mutable_assignment();
  a->set_generation(2);
  *a->mutable_source() = d.source;
  a->mutable_source()->set_made_by(1);
  d.generation = 2;
  EXPECT_EQ(made_by(), 1);
  // Generation 3 ended before it restored what generation 2 had.
  a->set_generation(3);
  a->mutable_source()->add_states()->set_generation(2);
  EXPECT_EQ(made_by(), 1);
  d.source.set_step(11);
  EXPECT_EQ(made_by(), 2);
}

TEST_F(MemoryRecovery, AWorkerThatReturnsInTimeBringsItsPart) {
  holds("a", 0);
  ASSERT_EQ(decide({"b"}).kind, Kind::kWait);
  holds("b", 1);
  const Recovery::Decision d = decide({}, 200);
  ASSERT_EQ(d.kind, Kind::kRestore);
  EXPECT_EQ(d.source.step(), 10);
}

// The next mesh has one rank, and no process on the other host to read its
// half.
TEST_F(MemoryRecovery, AStateThatTheNextMeshCannotReachIsRescued) {
  hold_all();
  durable.mutable_mesh_request()->set_scale(1);
  const Recovery::Decision d = decide();
  expect_rescue(d);
  EXPECT_EQ(d.placement.layout, (geometry::Layout{.dp = 2}));
  EXPECT_EQ(hosts_of(d.placement, roster),
            (std::set<std::string>{"host-a", "host-b"}));
}

// Generation 2 restored step 10, and then ended.
TEST_F(MemoryRecovery, ARescueUsesNoCordonedHostWhereOthersHoldTheState) {
  hold_all();
  holds("c", 0, 2);
  holds("d", 1, 2);
  durable.set_generation(2);
  cordon({.host = "host-b"}, {}, /*now_s=*/0, durable.mutable_host_faults());
  durable.mutable_mesh_request()->set_scale(1);
  const Recovery::Decision d = decide();
  expect_rescue(d);
  EXPECT_EQ(hosts_of(d.placement, roster),
            (std::set<std::string>{"host-c", "host-d"}));
}

// Ranks do not start on the hosts that hold the state, as where their data set
// is gone.
TEST_F(MemoryRecovery, HostsWhereRanksFailAreTriedAgainBeforeAnOlderState) {
  hold_all();
  hear_all({"c"});
  durable.mutable_mesh_request()->set_scale(1);
  pb::HostFaults* faults = durable.mutable_host_faults();
  const auto fail = [&] {
    for (const char* host : {"host-a", "host-b"}) {
      suspect({.host = host}, {}, 0, 0, faults);
      cordon({.host = host}, cause_of("no data"), 0, faults);
    }
    recovery_.begin_generation();
  };
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(decide().rescue);
    fail();
  }
  const Recovery::Decision first = decide();
  ASSERT_EQ(first.kind, Kind::kWait);
  EXPECT_HAS(first.why.value(), "host-a (cordoned: no data)");
  EXPECT_GT(first.rescan_ms, 0);
  EXPECT_FALSE(decide({}, 200).why) << "it is announced once";
  expect_rescue(decide({}, kRescueMs));
  for (int i = 0; i < 3; ++i) fail();
  const Recovery::Decision last = decide();
  ASSERT_EQ(last.kind, Kind::kRestore);
  EXPECT_FALSE(last.rescue);
  EXPECT_EQ(last.source.path(), "step-5");
}

TEST_F(MemoryRecovery, WithoutARescueTheCheckpointIsUsed) {
  holds("a", 0);
  durable.mutable_mesh_request()->set_scale(1);
  const Recovery::Decision d = decide();
  ASSERT_EQ(d.kind, Kind::kRestore);
  EXPECT_FALSE(d.rescue);
  EXPECT_EQ(d.source.path(), "step-5");
}

TEST_F(MemoryRecovery, ALeavingWorkerTakesPartInTheRescue) {
  hold_all();
  roster.drain("b");
  expect_rescue(decide());
}

TEST_F(MemoryRecovery, AStateThatDidNotLoadIsNotTakenAgain) {
  hold_all();
  merge_text("refusals { states { generation: 1 step: 10 } }", &durable);
  const Recovery::Decision d = decide();
  ASSERT_EQ(d.kind, Kind::kRestore);
  EXPECT_EQ(d.source.path(), "step-5");
}

TEST(Refusals, OnlyTheCheckpointsOfTheStepSavedAgainAreForgiven) {
  pb::Refusals refused;
  for (const int step : {5, 6, 5, 7}) {
    auto source = text_message<pb::Source>("kind: CHECKPOINT");
    source.set_path(std::to_string(step));
    source.set_step(step);
    refuse_source(source, Roster(), &refused);
  }
  forgive_checkpoint(5, &refused);
  ASSERT_EQ(refused.checkpoints_size(), 2);
  ASSERT_EQ(refused.checkpoint_steps_size(), 2);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(refused.checkpoints(i), std::to_string(6 + i));
    EXPECT_EQ(refused.checkpoint_steps(i), 6 + i);
  }
}

// As on a network file system that caches its listing.
TEST_F(MemoryRecovery, ACommittedCheckpointThatIsNotListedIsLookedForAgain) {
  holds("a", 0);
  durable.set_saved_step(8);
  const Recovery::Decision first = decide();
  ASSERT_EQ(first.kind, Kind::kWait);
  EXPECT_GT(first.rescan_ms, 0);
  EXPECT_HAS(first.why.value(), "step 8 was committed");
  const Recovery::Decision late = decide({}, 100 + 60'000);
  ASSERT_EQ(late.kind, Kind::kRestore);
  EXPECT_EQ(late.source.path(), "step-5");
  EXPECT_HAS(late.source.reason(), "step 8 was committed");
}

// Without states in memory: from checkpoints, or as the source was refused.
class RecoveryTest : public ::testing::Test, protected RosterFixture {
 protected:
  static CheckpointInfo saved(int64_t step, int64_t generation = 1) {
    return {.step = step,
            .generation = generation,
            .path = "step-" + std::to_string(step)};
  }
  Recovery::Decision decide(const StepLedger& ledger,
                            const CheckpointsScanned& scan) {
    const MeshPolicy policy(small_job(), std::nullopt);
    Recovery recovery(small_job(), std::nullopt);
    const ClusterView now = view();
    return recovery.decide({.view = now,
                            .ledger = ledger,
                            .scan = scan,
                            .policy = policy,
                            .missing_holders = {}},
                           *policy.place(now));
  }
};

TEST_F(RecoveryTest, RestoresTheNewestCheckpointOfTheJobsOwnBranch) {
  hear_all({"a"});
  // Generation 2 continued from step 4 without what generation 1 saved later.
  const StepLedger ledger(6, {}, {{1, 1}, {2, 5}});
  const auto d = decide(ledger, {.valid = {saved(4), saved(8), saved(6, 2)}});
  ASSERT_EQ(d.kind, Recovery::Decision::Kind::kRestore);
  EXPECT_EQ(d.source.path(), "step-6");
  EXPECT_EQ(d.generation, 2);
}

TEST_F(RecoveryTest, NeverUsesInitialWeightsWhileCheckpointsExist) {
  hear_all({"a"});
  EXPECT_EQ(decide({}, {}).source.kind(), pb::Source::INIT);
  EXPECT_EQ(decide({}, {.invalid = {{.step = 5}}}).kind,
            Recovery::Decision::Kind::kGiveUp);
  durable.mutable_refusals()->add_checkpoints("step-5");
  const auto d = decide({}, {.valid = {saved(5)}});
  ASSERT_EQ(d.kind, Recovery::Decision::Kind::kGiveUp);
  EXPECT_HAS(d.why.value(), "step-5: does not load");
}

TEST_F(RecoveryTest, ACheckpointThatDoesNotLoadIsTriedOnOtherHosts) {
  durable = running({"a"});
  hear_all({"a", "b"});
  const auto tries_on = [&](const std::vector<std::string>& workers) {
    planner::Placement next;
    for (const std::string& w : workers)
      next.ranks.emplace_back().set_worker(w);
    return try_elsewhere(next, view(), durable.mutable_refusals());
  };
  EXPECT_FALSE(tries_on({"b"})) << "every checkpoint loads";
  durable.mutable_refusals()->add_checkpoints("step-5");
  durable.mutable_refusals()->add_checkpoint_steps(5);
  EXPECT_FALSE(tries_on({"a"}));
  EXPECT_EQ(durable.refusals().checkpoints_size(), 1);
  EXPECT_TRUE(tries_on({"a", "b"}));
  EXPECT_EQ(durable.refusals().checkpoints_size(), 0);
  EXPECT_EQ(durable.refusals().checkpoint_steps_size(), 0);
}

TEST_F(RecoveryTest, RefusesAMemorySourceOnlyWhileAllOfItIsThere) {
  durable = running({"a"});
  pb::Source* source = durable.mutable_assignment()->mutable_source();
  merge_text(
      "kind: MEMORY step: 3 "
      "states { worker: 'a' generation: 1 step: 3 rank: 0 }",
      source);
  hear_all({"a"});
  pb::Refusals refused;
  refuse_source(*source, roster, &refused);
  EXPECT_EQ(refused.states_size(), 0) << "the worker lost it";
  pb::Report r = report("a", 0);
  *r.add_holdings() = source->states(0);
  hear(r);
  refuse_source(*source, roster, &refused);
  EXPECT_EQ(refused.states_size(), 1);
  EXPECT_EQ(lost_source(view(), false), "");
  EXPECT_TRUE(source_is_there(roster, *source));
  roster.expire(durable, 10, 1000);
  EXPECT_EQ(lost_source(view(), true), "a");
  pb::Report restarted = report("a", 0, 2);
  hear(restarted);
  EXPECT_EQ(lost_source(view(), false), "") << "it may still list the state";
  EXPECT_FALSE(source_is_there(roster, *source));
  restarted.set_has_inventory(true);
  hear(restarted);
  EXPECT_EQ(lost_source(view(), true), "a");
  EXPECT_FALSE(forgive_source(*source, "b", &refused)) << "b had no part of it";
  EXPECT_TRUE(forgive_source(*source, "a", &refused));
  EXPECT_EQ(refused.states_size(), 0);
  EXPECT_FALSE(forgive_source(*source, "a", &refused));
}

TEST_F(RecoveryTest, WaitsForTheAnswerOfEveryHolderBeforeASourceIsRefused) {
  durable = running({"a"});
  for (const char* holder : {"a", "b"})
    durable.mutable_assignment()->mutable_source()->add_states()->set_worker(
        holder);
  hear_all({"a", "b"});
  roster.begin_phase();
  pb::Report ended = report("a", 0);
  merge_text("generation: 1 state: QUIESCED", &ended);
  hear(ended);
  EXPECT_FALSE(holders_answered(view())) << "b is silent";
  hear(report("b", 0));
  EXPECT_FALSE(holders_answered(view())) << "this one may be an old one";
  hear(report("b", 0));
  EXPECT_TRUE(holders_answered(view()));
  roster.begin_phase();
  EXPECT_FALSE(holders_answered(view()));
  for (const char* holder : {"a", "b"})
    roster.on_disconnect(holder, 0, "revoked");
  roster.expire(durable, 10, 1000);
  EXPECT_TRUE(holders_answered(view())) << "nobody will answer";
}

}  // namespace
}  // namespace remesh::core
