// Who may change what: messages of workers that have no part in it have no
// effect.
#include <fmt/format.h>

#include "coordinator/core/coordinator.h"
#include "proto/limits/plausible.h"
#include "tests/testing/expect.h"
#include "tests/unit/core/builders.h"
#include "tests/unit/core/one_worker.h"

namespace remesh::core {
namespace {

std::vector<std::string> events_of(const std::vector<Action>& actions) {
  std::vector<std::string> out;
  for (const EmitEvent& e : all_of<EmitEvent>(actions))
    out.push_back(e.record.event());
  return out;
}

// A job that worker "a" runs in generation 1.
class Admission : public testing::Test {
 protected:
  Admission() : core_(options()) {
    core_.start(now_);
    give(report("a", 1));
    core_.on(CheckpointsScanned{}, now_);
    pb::Report prepared = report("a", 2);
    merge_text("generation: 1 state: PREPARED", &prepared);
    give(prepared);
    give(running_report("a", 3, 0, 0));
    CHECK(core_.durable().phase() == pb::Durable::RUNNING);
  }
  static Options options() {
    Options o = OneWorker::options();
    o.job.mutable_elastic()->set_max_slots(1);
    return o;
  }
  std::vector<Action> give(const pb::Report& r) {
    return core_.on(received(r), now_);
  }

  int64_t now_ = 1000;
  Coordinator core_;
};

TEST_F(Admission, ARefusedReportIsAnsweredAndAnnouncedOnceAMinute) {
  const std::string before = core_.durable().SerializeAsString();
  pb::Report bad = report("b", 1);
  bad.set_slots(-1);
  auto actions = give(bad);
  ASSERT_EQ(all_of<Refuse>(actions).size(), 1U);
  const pb::Refusal refusal = all_of<Refuse>(actions)[0].refusal;
  EXPECT_EQ(refusal.kind(), pb::Refusal::RETRY);
  EXPECT_HAS(refusal.reason(), "slots = -1");
  EXPECT_EQ(events_of(actions), std::vector<std::string>{"report_refused"});
  for (int i = 0; i < 100; ++i) {
    bad.set_worker("b" + std::to_string(i));
    actions = give(bad);
    EXPECT_EQ(all_of<Refuse>(actions).size(), 1U);
    EXPECT_TRUE(events_of(actions).empty());
  }
  now_ += 60'000;
  actions = give(bad);
  ASSERT_EQ(events_of(actions).size(), 1U);
  EXPECT_EQ(all_of<EmitEvent>(actions)[0].record.detail(),
            "101 reports since the last event");
  EXPECT_EQ(core_.durable().SerializeAsString(), before);
  EXPECT_TRUE(core_.roster().find("b") == nullptr);
}

TEST_F(Admission, ARefusedReportDoesNotHarmALiveWorker) {
  pb::Report bad = running_report("a", 100, 0, 7);
  bad.set_generation(limits::kMaxNumber);
  give(bad);
  bad = running_report("a", 101, 0, 7);
  bad.set_coordinator_epoch(~uint64_t{1});
  give(bad);
  EXPECT_FALSE(core_.roster().newest_is(bad));
  EXPECT_EQ(core_.durable().generation(), 1);
  const pb::Report good = running_report("a", 4, 0, 1);
  EXPECT_TRUE(all_of<Refuse>(give(good)).empty());
  EXPECT_TRUE(core_.roster().newest_is(good)) << "its numbers were not used up";
}

TEST_F(Admission, AnUnusedNumberEndsNoGeneration) {
  const std::string before = core_.durable().SerializeAsString();
  for (const int64_t lead : {1, 900'000}) {
    for (const char* name : {"a", "stranger"}) {
      pb::Report ahead = report(name, 50, /*incarnation=*/2);
      ahead.set_slots(0);
      ahead.set_generation(1 + lead);
      EXPECT_EQ(all_of<Refuse>(give(ahead)).size(), 1U);
      ahead.set_generation(0);
      ahead.set_coordinator_epoch(core_.durable().epoch() + 1);
      EXPECT_EQ(all_of<Refuse>(give(ahead)).size(), 1U);
    }
  }
  EXPECT_EQ(core_.durable().SerializeAsString(), before);
  EXPECT_TRUE(core_.roster().find("stranger") == nullptr);
}

TEST_F(Admission, ACoordinatorWhoseClockWasFarAheadLocksNobodyOut) {
  pb::Report r = running_report("a", 4, 0, 0);
  const uint64_t epoch = core_.durable().epoch() + 2 * limits::kMaxEpochLeadMs;
  r.set_coordinator_epoch(epoch);
  EXPECT_EQ(all_of<Refuse>(give(r)).size(), 1U) << "anybody can say so";
  r.set_proof(proof_of(options().secret, epoch, r.generation()));
  EXPECT_TRUE(all_of<Refuse>(give(r)).empty());
  EXPECT_EQ(core_.durable().epoch(), epoch + 1);
}

TEST_F(Admission, WorkersAreBoundedInNumber) {
  for (size_t i = 1; i < limits::kMaxWorkers; ++i) {
    pb::Report r = report(fmt::format("w{}", i), 1);
    r.set_host("h");
    core_.take(received(r), now_);
  }
  const auto refused = all_of<Refuse>(give(report("b", 1)));
  ASSERT_EQ(refused.size(), 1U);
  EXPECT_HAS(refused[0].refusal.reason(), "no more are allowed");
  EXPECT_TRUE(core_.roster().find("b") == nullptr);
  EXPECT_TRUE(all_of<Refuse>(give(running_report("a", 4, 0, 1))).empty());
}

// elastic.closed_after_ms
TEST(ClosedConnection, IsALossAfterTheJobsTime) {
  for (const int64_t closed_ms : {0, 900'000}) {
    Options o = OneWorker::options();  // a silence of 1'000'000 ms is death
    o.job.mutable_elastic()->set_closed_after_ms(closed_ms);
    Coordinator core(o);
    core.start(0);
    core.on(received(report("a", 1)), 0);
    core.on(PeerLost{"a", ""}, 1);
    bool lost = false;
    for (int64_t now = 100; now <= 800'000 && !lost; now += 100)
      for (const std::string& e : events_of(core.on(Tick{}, now)))
        lost = lost || e == "worker_lost";
    EXPECT_EQ(lost, closed_ms == 0);
  }
}

TEST_F(Admission, AWorkerWithoutACommonProtocolIsRefusedPermanently) {
  pb::Report far = report("far", 1);
  merge_text("protocol: 9 oldest_protocol: 7", &far);
  const auto refused = all_of<Refuse>(give(far));
  ASSERT_EQ(refused.size(), 1U);
  EXPECT_EQ(refused[0].refusal.kind(), pb::Refusal::PERMANENT);
  EXPECT_HAS(refused[0].refusal.reason(), "versions 7 to 9");
  EXPECT_TRUE(core_.roster().find("far") == nullptr);
  pb::Report next = report("next", 1);
  merge_text("protocol: 9 oldest_protocol: 1", &next);
  EXPECT_TRUE(all_of<Refuse>(give(next)).empty());
  EXPECT_TRUE(core_.roster().find("next") != nullptr);
}

// The coordinator's clock is at 1970, the worker's decades ahead.
TEST_F(Admission, AWrongClockKeepsNoWorkerOut) {
  pb::Report r = report("b", 1, uint64_t{4'000'000'000'000} << 20);
  EXPECT_TRUE(all_of<Refuse>(give(r)).empty());
  EXPECT_TRUE(core_.roster().find("b") != nullptr);
}

TEST_F(Admission, StepsBeyondTheJobsAreRefused) {
  pb::Report far = running_report("a", 50, 0, 1001);
  EXPECT_EQ(all_of<Refuse>(give(far)).size(), 1U);
  far = running_report("a", 51, 0, 5);
  far.mutable_ranks(0)->set_checkpoint_step(7);
  EXPECT_EQ(all_of<Refuse>(give(far)).size(), 1U);
  far.mutable_ranks(0)->set_checkpoint_step(6);
  EXPECT_EQ(all_of<Refuse>(give(far)).size(), 0U);
  EXPECT_EQ(core_.status().checkpoint_step(), 6);
  const pb::Report last = running_report("a", 52, 0, 1000);
  EXPECT_EQ(all_of<Refuse>(give(last)).size(), 0U);
}

TEST_F(Admission, RanksAreAcceptedOnlyFromTheWorkerThatRunsThem) {
  pb::Report stranger = running_report("b", 1, 0, 5);
  merge_text("checkpoint_step: 6 exited: true exit_code: 3",
             stranger.mutable_ranks(0));
  EXPECT_EQ(events_of(give(stranger)),
            std::vector<std::string>{"worker_joined"});
  EXPECT_EQ(core_.status().checkpoint_step(), 0);
  EXPECT_EQ(core_.durable().phase(), pb::Durable::RUNNING);
  // The participant itself, of a rank that it does not have.
  pb::Report other = running_report("a", 4, 1, 5);
  other.mutable_ranks(0)->set_checkpoint_step(6);
  give(other);
  EXPECT_EQ(core_.status().checkpoint_step(), 0);
  pb::Report own = running_report("a", 5, 0, 5);
  own.mutable_ranks(0)->set_checkpoint_step(5);
  give(own);
  EXPECT_EQ(core_.status().checkpoint_step(), 5);
}

TEST_F(Admission, StatesThatNobodyCanHaveAreNotBelieved) {
  pb::Report r = report("b", 1);
  merge_text("generation: 1 has_inventory: true", &r);
  for (const auto& [step, generation] :
       {std::pair{1000, 1}, {1001, 1}, {1000, 2}, {1, 1}}) {
    pb::StateHolding* h = r.add_holdings();
    merge_text("sharding { mesh { dp: 1 pp: 1 tp: 1 cp: 1 } chunks: 1 }", h);
    h->set_step(step);
    h->set_generation(generation);
  }
  EXPECT_TRUE(all_of<Refuse>(give(r)).empty());
  const auto& states = core_.roster().find("b")->report.holdings();
  ASSERT_EQ(states.size(), 2);
  EXPECT_EQ(states[0].step(), 1000);
  EXPECT_EQ(states[1].step(), 1);
}

// A few hundred bytes each, of any number of names with one key.
TEST_F(Admission, StatesAreBoundedInAll) {
  const auto refused = [&](const std::string& worker, int states) {
    pb::Report r = report(worker, 1);
    r.set_host("h");
    r.set_has_inventory(true);
    for (int i = 0; i < states; ++i)
      merge_text("sharding { mesh { dp: 1 pp: 1 tp: 1 cp: 1 } chunks: 1 }",
                 r.add_holdings());
    return all_of<Refuse>(give(r));
  };
  for (int i = 0; i < (1 << 18) / limits::kMaxHoldings; ++i)
    EXPECT_TRUE(refused(fmt::format("w{}", i), limits::kMaxHoldings).empty());
  const auto more = refused("b", 257);
  ASSERT_EQ(more.size(), 1U);
  EXPECT_HAS(more[0].refusal.reason(), "states: 257");
  EXPECT_TRUE(refused("c", 256).empty());
}

TEST_F(Admission, ARankIsReportedOnce) {
  pb::Report r = running_report("a", 4, 0, 1);
  r.set_slots(2);
  *r.add_ranks() = r.ranks(0);
  const auto refused = all_of<Refuse>(give(r));
  ASSERT_EQ(refused.size(), 1U);
  EXPECT_HAS(refused[0].refusal.reason(), "ranks.rank = 0: occurs twice");
}

TEST_F(Admission, AMachineWithTheSameHostNameCannotTakeAWorkerName) {
  const auto of_machine = [](const std::string& worker, uint64_t id,
                             uint64_t incarnation) {
    pb::Report r = report(worker, 50, incarnation);
    r.set_host("node");
    r.set_host_id(id);
    return r;
  };
  EXPECT_TRUE(all_of<Refuse>(give(of_machine("b", 1, 5))).empty());
  EXPECT_EQ(all_of<Refuse>(give(of_machine("b", 2, 6))).size(), 1U);
  EXPECT_TRUE(core_.roster().considers_live("b", 5));
  EXPECT_TRUE(all_of<Refuse>(give(of_machine("b", 1, 6))).empty());
  EXPECT_TRUE(core_.roster().considers_live("b", 6)) << "restarted";
}

TEST_F(Admission, FenceContributionsAreBoundedByTheRanks) {
  auto f =
      text_message<pb::FenceIn>("worker: 'a' incarnation: 1 generation: 1");
  const auto answers = [&] {
    return all_of<SendFence>(core_.on(received(f), now_)).size();
  };
  f.set_index(3);
  EXPECT_EQ(answers(), 0U);
  f.set_index(0);
  f.set_blob(std::string(limits::kMaxFenceBytes + 1, 'b'));
  EXPECT_EQ(answers(), 0U);
  f.set_blob("b");
  EXPECT_EQ(answers(), 1U);
}

// A worker that an older journal has with an impossible number of slots ends
// no job; it is left out until it reports.
TEST(Planner, AnInvalidMemberIsIgnored) {
  pb::Durable d;
  d.set_phase(pb::Durable::WAITING);
  Roster roster;
  for (const char* name : {"a", "b"}) {
    pb::Report r = report(name, 1);
    if (std::string(name) == "b") r.set_slots(-1);
    roster.on_report(r, d, 500, 0);
  }
  const MeshPolicy policy(small_job(), std::nullopt);
  ASSERT_OK_AND(const auto placed,
                policy.place({.roster = roster, .durable = d}));
  EXPECT_EQ(placed.ranks.size(), 1U);
}

TEST(Places, DirectivesGoWhereTheNewestReportCameFrom) {
  Roster roster;
  const pb::Durable d;
  const pb::Report first = report("a", 5);
  const pb::Report older = report("a", 4);
  EXPECT_TRUE(roster.on_report(first, d, 500, 0).has_value());
  EXPECT_FALSE(roster.on_report(older, d, 500, 0).has_value());
  EXPECT_TRUE(roster.newest_is(first));
  EXPECT_FALSE(roster.newest_is(older));
}

}  // namespace
}  // namespace remesh::core
