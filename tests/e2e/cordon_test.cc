// A host or worker on which ranks do not start, beside one that trains.
#include <fmt/format.h>

#include "tests/e2e/e2e.h"
#include "tests/testing/expect.h"
#include "tests/testing/temp_dir.h"

namespace remesh::e2e {
namespace {

class CordonTest : public E2e {
 protected:
  // `bad` joins a job on another host, or on the same: that host or worker is
  // cordoned, tried again when that is asked for, and costs no finished step.
  void expect_cordoned(testing::WorkerStart bad, const std::string& why,
                       const std::string& host = "bad-host");
};

void CordonTest::expect_cordoned(testing::WorkerStart bad,
                                 const std::string& why,
                                 const std::string& host) {
  make(endless({{"checkpoint.interval", "0"}}));
  c().start_coordinator();
  c().start_worker({.name = "good", .more = {"--host-name", "good-host"}});
  ASSERT_TRUE(c().wait_for_step(5));
  bad.name = "bad";
  bad.more.insert(bad.more.end(), {"--host-name", host});
  c().start_worker(bad);
  ASSERT_TRUE(c().wait_for_event("host_cordoned"));
  const Json e = c().events_named("host_cordoned")[0];
  EXPECT_EQ(e["host"], host) << e;
  EXPECT_EQ(e.contains("worker"), host == "good-host") << e;
  EXPECT_HAS(e.value("cause", ""), why) << e;
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 20));

  const Json status = c().wait_for_status([](const Json& s) {
    return s["cordons"].size() == 1 && s["cordons"][0]["remaining_s"] > 0;
  });
  ASSERT_FALSE(status.is_null());
  EXPECT_EQ(status["cordons"][0]["host"], host);
  for (const Json& w : status["workers"])
    EXPECT_EQ(w["cordoned"] == "", w["name"] == "good") << w;
  expect_remesh(5, {"uncordon", "good", c().run_dir()});
  expect_remesh(0, {"uncordon", "bad", c().run_dir()});
  ASSERT_TRUE(c().wait_for_event("host_cordoned", 2));
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 20));
  expect_no_step_lost();
  stop_in_order();
  for (const char* w : {"good", "bad"}) expect_exit(c().worker(w), 0);
  expect_sequence(c().last_step());
}

TEST_F(CordonTest, AHostWithAWrongTrainerProgramIsCordoned) {
  expect_cordoned({.more = {"--trainer", "/bin/false"}}, "exit code 1");
}

// Others would wait for its ranks.
TEST_F(CordonTest, AHostWhoseTrainerEndsWithoutAnErrorIsCordoned) {
  expect_cordoned({.more = {"--trainer", "/bin/true"}}, "exit code 0");
}

TEST_F(CordonTest, AWorkerWithAWrongTrainerProgramIsCordonedAlone) {
  expect_cordoned({.more = {"--trainer", "/bin/false"}}, "exit code 1",
                  "good-host");
}

// Arguments before a program that sees the result of this `mount` alone.
std::vector<std::string> with_mount(const std::string& arguments) {
  return {"unshare", "-m", "sh", "-c", "mount " + arguments + " && exec \"$@\"",
          "sh"};
}

bool can_run_with(std::vector<std::string> prefix) {
  prefix.emplace_back("true");
  return testing::run_program(prefix).exit.code == 0;
}

TEST_F(CordonTest, AHostWithTooLittleSharedMemoryIsCordoned) {
  const auto small = with_mount("-t tmpfs -o size=1m tmpfs /dev/shm");
  if (!can_run_with(small)) GTEST_SKIP() << "needs mount";
  expect_cordoned({.prefix = small}, "of shared memory");
}

TEST_F(CordonTest, AHostOrWorkerWithOtherDataIsCordoned) {
  const testing::TinyData other(59);
  const auto replaced =
      with_mount("--bind '" + other.path() + "' '" + data_path() + "'");
  if (!can_run_with(replaced)) GTEST_SKIP() << "needs mount";
  for (const char* host : {"bad-host", "good-host"})
    expect_cordoned({.prefix = replaced}, "on this host is data set", host);
}

// The host has the only copy of the state, and no rank can train there any
// more.
TEST_F(CordonTest, AHostThatLosesItsDataCostsNoStep) {
  const std::vector<std::string> own_mounts = {"unshare", "-m"};
  if (!can_run_with(with_mount("-t tmpfs tmpfs /mnt")))
    GTEST_SKIP() << "needs mount";
  make(endless({{"checkpoint.interval", "0"}, {"elastic.max_slots", "1"}}));
  c().start_coordinator();
  const Process& bad = c().start_worker({.name = "bad",
                                         .more = {"--host-name", "bad-host"},
                                         .prefix = own_mounts});
  ASSERT_TRUE(c().wait_for_step(5));
  c().start_worker({.name = "good", .more = {"--host-name", "good-host"}});
  ASSERT_TRUE(c().wait_for_event("worker_joined", 2));
  const TempDir empty;
  const Finished gone =
      testing::run_program({"nsenter", "-t", std::to_string(bad.pid()), "-m",
                            "mount", "--bind", empty.path(), data_path()});
  ASSERT_EQ(gone.exit.code, 0) << gone.output;
  testing::send_signal(c().rank_pids(1).at(0), SIGKILL);
  ASSERT_TRUE(c().wait_for_event("host_cordoned"));
  ASSERT_TRUE(c().wait_for_event("checkpoint"));
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 10));
  expect_no_step_lost();
  stop_in_order();
  for (const char* w : {"good", "bad"}) expect_exit(c().worker(w), 0);
  expect_sequence(c().last_step());
}

}  // namespace
}  // namespace remesh::e2e
