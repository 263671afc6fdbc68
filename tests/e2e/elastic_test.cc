// Workers that join, leave and hang.
#include <fmt/format.h>

#include "tests/e2e/e2e.h"
#include "tests/testing/expect.h"

namespace remesh::e2e {
namespace {

class ElasticTest : public E2e {};

TEST_F(ElasticTest, AWorkerThatJoinsMakesTheMeshLarger) {
  make(endless());
  start_services(1);
  c().start_worker({.name = "late"});
  ASSERT_TRUE(c().wait_for_dp(2));
  const auto meshes = c().events_named("mesh");
  ASSERT_EQ(meshes.size(), 2U);
  EXPECT_EQ(lost_steps(meshes[1]), 0);
  EXPECT_EQ(c().events_named("failure").size(), 0U);
  stop_and_check();
}

TEST_F(ElasticTest, ADrainedWorkerLeavesAndNothingIsLost) {
  make(endless({{"checkpoint.interval", "0"}}));
  start_services(2);
  expect_remesh(0, {"drain", "w1", c().run_dir()});
  expect_exit(c().worker("w1"), 0);
  ASSERT_TRUE(c().wait_for_dp(1));
  EXPECT_EQ(lost_steps(c().events_named("mesh").back()), 0);
  EXPECT_EQ(c().events_named("failure").size(), 0U);
  stop_and_check();
}

TEST_F(ElasticTest, DrainingAnUnknownWorkerListsTheKnownOnes) {
  make(endless());
  start_services(1);
  const Finished f = c().remesh({"drain", "w7", c().run_dir()});
  EXPECT_NE(f.exit.code, 0);
  EXPECT_HAS(f.output, "w1");
  stop_in_order();
}

TEST_F(ElasticTest, SigtermToAWorkerLosesNothing) {
  make(endless({{"checkpoint.interval", "0"}}));
  start_services(2);
  terminate_worker("w2");
  ASSERT_TRUE(c().wait_for_dp(1));
  EXPECT_EQ(lost_steps(c().events_named("mesh").back()), 0);
  EXPECT_EQ(c().events_named("failure").size(), 0U);
  stop_and_check();
}

// The ranks agree on the stop; no coordinator is needed.
TEST_F(ElasticTest, SigtermWithoutACoordinatorSavesAndLosesNothing) {
  make(endless(
      {{"checkpoint.interval", "0"}, {"elastic.dead_after_ms", "6000"}}));
  start_services(2);
  kill_coordinator();
  c().worker("w2").kill(SIGTERM);
  ASSERT_TRUE(testing::wait_until(
      [&] {
        return c().remesh({"checkpoint", "verify", c().run_dir()}).exit.code ==
               0;
      },
      kEndMs));
  expect_exit(c().worker("w2"), 0);
  c().start_coordinator();
  ASSERT_TRUE(c().wait_for_dp(1));
  EXPECT_EQ(lost_steps(c().events_named("mesh").back()), 0);
  stop_and_check();
  EXPECT_EQ(c().events_named("metrics_gap").size(), 0U);
}

TEST_F(ElasticTest, AStoppedRankIsDetectedAndNamed) {
  make(endless({{"elastic.hang_after_s", "6"}}));
  start_services(3);
  const auto pids = c().rank_pids(3);
  ASSERT_EQ(pids.size(), 3U);
  const int64_t before = c().last_step();
  testing::send_signal(pids.at(2), SIGSTOP);
  ASSERT_TRUE(c().wait_for_event("failure"));
  const Json e = c().events_named("failure")[0];
  EXPECT_EQ(e["rank"], 2) << e;
  EXPECT_HAS(e.value("cause", ""), "stopped") << e;
  ASSERT_TRUE(c().wait_for_dp(3, before));
  EXPECT_EQ(testing::process_state(pids.at(2)), "");
  stop_in_order();
}

TEST_F(ElasticTest, AStoppedWorkerCountsAsDeadUntilItReturns) {
  make(endless({{"elastic.dead_after_ms", "6000"}}));
  start_services(2);
  c().worker("w2").kill(SIGSTOP);
  ASSERT_TRUE(c().wait_for_dp(1));
  const auto failures = c().events_named("failure");
  ASSERT_EQ(failures.size(), 1U);
  EXPECT_EQ(failures[0]["worker"], "w2") << failures[0];
  const int64_t alone = c().last_step();
  c().worker("w2").kill(SIGCONT);
  ASSERT_TRUE(c().wait_for_dp(2, alone));
  stop_and_check();
}

TEST_F(ElasticTest, TenWorkersStartedTogetherMakeOneGeneration) {
  // The states of ten ranks would take 80 MiB of /dev/shm.
  make(endless({{"elastic.min_slots", "10"},
                {"elastic.keep_state", "false"},
                {"train.global_batch_size", "20"}}));
  c().start_coordinator();
  for (int i = 0; i < 10; ++i)
    c().start_worker({.name = fmt::format("w{}", i)});
  ASSERT_TRUE(c().wait_for_step(3));
  const auto meshes = c().events_named("mesh");
  ASSERT_EQ(meshes.size(), 1U) << meshes.back();
  EXPECT_EQ(meshes[0]["mesh"]["dp"], 10);
  stop_in_order();
}

TEST_F(ElasticTest, WaitsForTheMinimumNumberOfSlots) {
  make(endless({{"elastic.min_slots", "2"}}));
  start_services(2);
  const size_t waited = c().events_named("waiting").size();
  terminate_worker("w2");
  ASSERT_TRUE(c().wait_for_event("waiting", waited + 1));
  const int64_t at = c().last_step();
  c().start_worker({.name = "w3"});
  ASSERT_TRUE(c().wait_for_step(at + 3));
  // No step was made between.
  for (const Json& m : c().metrics()) EXPECT_EQ(m["mesh"]["dp"], 2) << m;
  EXPECT_EQ(c().metrics()[static_cast<size_t>(at)]["generation"],
            c().events_named("mesh").back()["generation"]);
  stop_and_check();
}

}  // namespace
}  // namespace remesh::e2e
