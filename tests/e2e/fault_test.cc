// Ranks, workers and coordinators that die at any time.
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "tests/e2e/e2e.h"
#include "tests/testing/expect.h"
#include "tests/testing/seed.h"

namespace remesh::e2e {
namespace {

class FaultTest : public E2e {
 protected:
  // Kills rank `rank` or worker w(rank + 1), which is restarted, and waits
  // until the mesh is complete again.
  void kill_one(bool daemon, int rank);
};

void FaultTest::kill_one(bool daemon, int rank) {
  const int64_t before = c().last_step();
  const size_t failures = c().events_named("failure").size();
  const auto pids = c().rank_pids(2);
  ASSERT_EQ(pids.size(), 2U);
  if (daemon) {
    const std::string name = fmt::format("w{}", rank + 1);
    c().worker(name).kill(SIGKILL);
    c().start_worker({.name = name});
  } else {
    testing::send_signal(pids.at(rank), SIGKILL);
  }
  ASSERT_TRUE(c().wait_for_event("failure", failures + 1));
  ASSERT_TRUE(c().wait_for_dp(2, before));
}

TEST_F(FaultTest, TenRandomKillsDoNotChangeTheLosses) {
  const uint32_t seed = test_seed();
  std::mt19937 random(seed);
  SCOPED_TRACE(fmt::format("seed {}", seed));
  // The mesh always has two ranks: the job waits for two slots.
  const Settings job = endless({{"elastic.min_slots", "2"},
                                {"elastic.max_slots", "2"},
                                {"checkpoint.interval", "5"}});
  make(job);
  c().start_coordinator();
  for (const char* name : {"w1", "w2"}) c().start_worker({.name = name});
  for (int k = 0; k < 10; ++k) {
    const auto steps = static_cast<int64_t>(random() % 8);
    ASSERT_TRUE(c().wait_for_step(12 * k + 2 + steps));
    kill_one(k % 2 == 1, static_cast<int>(random() % 2));
    if (HasFatalFailure()) return;
  }
  stop_and_check();
  for (const Json& m : c().metrics()) EXPECT_EQ(m["mesh"]["dp"], 2);
  EXPECT_GE(c().metrics().back()["generation"], 11);
  const auto disturbed = raw_losses(c().metric_lines());
  EXPECT_EQ(disturbed, raw_losses(undisturbed_lines(job, 2)));
}

TEST_F(FaultTest, AKilledRankIsNamed) {
  make(endless());
  start_services(3);
  const auto pids = c().rank_pids(3);
  ASSERT_EQ(pids.size(), 3U);
  const int64_t before = c().last_step();
  testing::send_signal(pids.at(1), SIGKILL);
  ASSERT_TRUE(c().wait_for_event("failure"));
  const Json e = c().events_named("failure")[0];
  EXPECT_EQ(e["rank"], 1);
  EXPECT_HAS(e.value("cause", ""), "signal 9") << e;
  ASSERT_TRUE(c().wait_for_dp(3, before));
  stop_in_order();
}

// A rank is stopped, then killed: the event names what it was doing, and its
// flight record ends there.
TEST_F(FaultTest, AKilledRankLeavesAFlightRecord) {
  make(endless());
  start_services(2);
  const auto pids = c().rank_pids(2);
  ASSERT_EQ(pids.size(), 2U);
  const auto rank_1 = [](const Json& status) {
    for (const Json& w : status["workers"])
      for (const Json& r : w["ranks"])
        if (r["rank"] == 1) return r;
    return Json::object();
  };
  const auto is_stopped = [&](const Json& status) {
    return rank_1(status).value("os_state", "") == "T";
  };
  const auto doing = [&](const Json& status) {
    return is_stopped(status) ? rank_1(status).value("doing", "") : "";
  };
  // Without its duration.
  const auto what = [](const std::string& text) {
    return text.substr(0, text.rfind(" for "));
  };
  // Most of a step, but not all of it, is spent in some operation.
  std::string at;
  for (int tries = 0; tries < 20; ++tries) {
    testing::send_signal(pids.at(1), SIGSTOP);
    const Json status =
        c().wait_for_status([&](const Json& s) { return !doing(s).empty(); });
    ASSERT_FALSE(status.is_null());
    at = what(doing(status));
    if (std::count(at.begin(), at.end(), ',') > 0 &&
        doing(status).find(" for ") != std::string::npos)
      break;
    testing::send_signal(pids.at(1), SIGCONT);
    // So that the next report of a stopped rank is about the next stop.
    ASSERT_FALSE(
        c().wait_for_status([&](const Json& s) { return !is_stopped(s); })
            .is_null());
  }
  testing::send_signal(pids.at(1), SIGKILL);
  ASSERT_TRUE(c().wait_for_event("failure"));
  const Json e = c().events_named("failure")[0];
  EXPECT_EQ(e["rank"], 1);
  EXPECT_EQ(e["signal"], SIGKILL);
  EXPECT_FALSE(e.contains("exit_code"));
  EXPECT_NE(e.value("host", ""), "");
  EXPECT_EQ(what(e.value("doing", "")), at) << e;
  EXPECT_EQ(at.rfind("step ", 0), 0U) << at;
  EXPECT_HAS(e.value("cause", ""), "SIGKILL") << e;
  EXPECT_FALSE(e["last_log"].empty());
  const std::string path =
      c().run_dir() + "/traces/" + e.value("flight_record", "none");
  Json flight;
  ASSERT_TRUE(testing::wait_until(
      [&] {
        flight = Json::parse(testing::read_whole(path), nullptr,
                             /*allow_exceptions=*/false);
        return flight.is_object();
      },
      60'000))
      << path;
  EXPECT_EQ(flight["otherData"]["rank"], 1);
  EXPECT_EQ(flight["otherData"]["ended"], "signal 9 (SIGKILL)");
  EXPECT_EQ(flight["otherData"]["torn"], 0);
  EXPECT_GT(flight["traceEvents"].size(), 50U);
  Json last;
  for (const Json& span : flight["traceEvents"])
    if (span["ph"] == "X" && span["tid"] == 0) last = span;
  EXPECT_EQ(last["args"]["unfinished"], 1) << last;
  EXPECT_HAS(at, last["name"].get<std::string>()) << last;
  EXPECT_HAS(at, fmt::format("step {}", last["args"]["step"].get<int>()))
      << last;
  // The other rank was killed by its worker, and its log says so.
  const std::string peer = path.substr(0, path.find("-rank-")) + "-rank-0.json";
  ASSERT_TRUE(testing::wait_until(
      [&] { return !testing::read_whole(peer).empty(); }, 60'000));
  EXPECT_EQ(Json::parse(testing::read_whole(peer))["otherData"]["ended"],
            "signal 9 (SIGKILL) by its worker");
  stop_in_order();
}

// Its peers wait for it in some group; the stopped rank waits for no one.
TEST_F(FaultTest, AStoppedRankOfAMeshIsNamedNotItsPeers) {
  make(endless({{"elastic.hang_after_s", "6"}, {"train.dtype", "\"fp32\""}}));
  c().start_coordinator();
  for (const char* name : {"w1", "w2"})
    c().start_worker({.name = name, .slots = 2});
  ASSERT_TRUE(c().wait_for_dp(4));
  const Finished f = c().remesh({"mesh", "dp2,tp2", c().run_dir()});
  ASSERT_EQ(f.exit.code, 0) << f.output;
  ASSERT_TRUE(c().wait_for_dp(2, c().last_step()));
  const auto pids = c().rank_pids(4);
  ASSERT_EQ(pids.size(), 4U);
  testing::send_signal(pids.at(2), SIGSTOP);
  ASSERT_TRUE(c().wait_for_event("failure"));
  const Json e = c().events_named("failure")[0];
  EXPECT_EQ(e["rank"], 2) << e;
  const std::string cause = e.value("cause", "");
  EXPECT_HAS(cause, "its process is stopped") << e;
  EXPECT_HAS(cause, "3 other ranks wait for it") << e;
  EXPECT_HAS(e.value("doing", ""), "step ") << e;
  EXPECT_FALSE(e.contains("signal")) << e;  // of the abort
  EXPECT_HAS(e.value("flight_record", ""), "rank-2");
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 2));
  stop_in_order();
}

TEST_F(FaultTest, TheLastLogLineOfAFailedRankIsQuoted) {
  make(endless({{"optimizer.lr", "1e30"},
                {"schedule.warmup_steps", "0"},
                {"elastic.max_same_failures", "3"}}));
  c().start_coordinator();
  c().start_worker({.name = "w1"});
  expect_exit(c().coordinator(), 3);
  const auto failures = c().events_named("failure");
  ASSERT_EQ(failures.size(), 1U);
  const Json& e = failures[0];
  EXPECT_EQ(e["exit_code"], 3) << e;
  EXPECT_FALSE(e.contains("signal")) << e;
  EXPECT_HAS(e.value("cause", ""), "diverged") << e;
  EXPECT_HAS(e.value("doing", ""), "step ") << e;
  EXPECT_HAS(e["last_log"].dump(), "diverged") << e;
  ASSERT_TRUE(c().worker("w1").wait_ms(kEndMs));
  // What it had finished is in memory for a while, and the job says so.
  EXPECT_HAS(c().events_named("job_failed")[0].value("detail", ""), "w1");
  EXPECT_TRUE(std::filesystem::exists(c().state_folder("w1")));
  c().lose_host("w1");
}

TEST_F(FaultTest, TheOthersContinueWithoutAKilledWorker) {
  make(endless({{"checkpoint.interval", "5"}}));
  start_services(3, 8);
  c().worker("w2").kill(SIGKILL);
  ASSERT_TRUE(c().wait_for_dp(2));
  const auto failures = c().events_named("failure");
  ASSERT_EQ(failures.size(), 1U);
  EXPECT_EQ(failures[0]["worker"], "w2") << failures[0];
  EXPECT_EQ(lost_steps(c().events_named("mesh").back()), 0);
  stop_and_check();
}

TEST_F(FaultTest, KillingTheCoordinatorOfRemeshRunLosesNoStep) {
  make(endless({{"elastic.min_slots", "2"}}));
  c().start_run(2);
  ASSERT_TRUE(c().wait_for_step(10));
  const auto before = c().rank_pids(2);
  ASSERT_EQ(before.size(), 2U);
  const int pid = c().status()["coordinator"]["pid"];
  testing::send_signal(pid, SIGKILL);
  ASSERT_TRUE(c().wait_for_event("coordinator_restarted"));
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 10));
  EXPECT_EQ(c().rank_pids(2), before);
  EXPECT_EQ(c().events_named("mesh").size(), 1U);
  // Who asks for a change in between reaches the next coordinator.
  const int next = c().status()["coordinator"]["pid"];
  EXPECT_NE(next, pid);
  testing::send_signal(next, SIGKILL);
  expect_remesh(0, {"stop", c().run_dir()});
  expect_exit(c().run(), 4);
  expect_sequence(c().last_step());
  for (const Json& m : c().metrics()) EXPECT_EQ(m["generation"], 1);
}

TEST_F(FaultTest, ARestartedCoordinatorServiceAdoptsItsRanks) {
  make(endless({{"elastic.dead_after_ms", "4000"}}));
  start_services(2);
  const auto before = c().rank_pids(2);
  ASSERT_EQ(before.size(), 2U);
  kill_coordinator();
  EXPECT_TRUE(c().status(/*tries=*/1).is_null());
  testing::sleep_ms(4500);  // longer than dead_after_ms: no effect
  const int64_t at = c().last_step();
  c().start_coordinator();
  ASSERT_TRUE(c().wait_for_step(at + 10));
  EXPECT_EQ(c().rank_pids(2), before);
  EXPECT_EQ(c().events_named("failure").size(), 0U);
  // A fault after that is still detected.
  testing::send_signal(before.at(0), SIGKILL);
  ASSERT_TRUE(c().wait_for_event("failure"));
  ASSERT_TRUE(c().wait_for_dp(2, c().last_step()));
  stop_and_check();
  EXPECT_EQ(c().events_named("metrics_gap").size(), 0U);
}

TEST_F(FaultTest, KillingARankAndTheCoordinatorTogetherLosesNoStep) {
  make(endless({{"checkpoint.interval", "5"}}));
  start_services(2, 8);
  const auto pids = c().rank_pids(2);
  ASSERT_EQ(pids.size(), 2U);
  const int64_t at = c().last_step();
  testing::send_signal(pids.at(1), SIGKILL);
  kill_coordinator();
  c().start_coordinator();
  ASSERT_TRUE(c().wait_for_dp(2, at + 3));
  stop_and_check();
}

TEST_F(FaultTest, ASecondCoordinatorIsRefused) {
  make(endless());
  start_services(1);
  const Finished second =
      testing::run_program({testing::program("remesh-coordinator"),
                            c().job_file(), "--run-dir", c().run_dir()});
  EXPECT_EQ(second.exit.code, 75) << second.output;
  EXPECT_HAS(second.output, std::to_string(c().coordinator().pid()));
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 3));
  stop_in_order();
}

// Somebody removes the lock of a coordinator that is stopped, and starts
// another one. When the first continues it ends, and has written nothing.
TEST_F(FaultTest, OfTwoCoordinatorsTheNewerContinues) {
  make(endless());
  start_services(1);
  Process& older = c().coordinator();
  older.kill(SIGSTOP);
  std::filesystem::remove(c().run_dir() + "/coordinator.lock");
  const int64_t stopped_at = c().last_step();
  c().start_coordinator();
  ASSERT_TRUE(c().wait_for_step(stopped_at + 5));
  older.kill(SIGCONT);
  expect_exit(older, 75);
  // It finds the other's lock, or the other's lines in its files.
  EXPECT_TRUE(older.output().find("another coordinator") != std::string::npos ||
              older.output().find("another one has written") !=
                  std::string::npos)
      << older.output();
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 5));
  EXPECT_EQ(c().events_named("mesh").size(), 1U) << "nobody was disturbed";
  EXPECT_TRUE(c().events_named("failure").empty());
  stop_and_check();
}

TEST_F(FaultTest, ARankThatAlwaysDiesFailsTheJobWithTheCause) {
  make(endless({{"checkpoint.interval", "1"},
                {"elastic.max_same_failures", "2"},
                {"elastic.max_failures_without_progress", "3"}}));
  // A trainer that exits at once.
  const std::string broken = c().folder() + "/broken";
  testing::write_whole(broken, "#!/bin/sh\necho cannot start >&2\nexit 70\n");
  chmod(broken.c_str(), 0755);
  c().start_coordinator();
  c().start_worker({.name = "w1", .more = {"--trainer", broken}});
  expect_exit(c().coordinator(), 3);
  const std::string last = testing::tail(c().coordinator().output(), 1);
  EXPECT_HAS(last, "rank 0 on worker w1");
  EXPECT_EQ(c().events_named("job_failed").size(), 1U);
  ASSERT_TRUE(c().worker("w1").wait_ms(kEndMs));
}

}  // namespace
}  // namespace remesh::e2e
