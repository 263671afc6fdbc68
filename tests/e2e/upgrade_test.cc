// Programs of several builds in one run.
#include <set>

#include "tests/e2e/e2e.h"
#include "tests/testing/expect.h"

namespace remesh::e2e {
namespace {

class Upgrade : public E2e {
 protected:
  // The builds of the workers that have ranks.
  static std::set<std::string> running_builds(const Json& status) {
    std::set<std::string> builds;
    for (const Json& w : status["workers"])
      if (!w["ranks"].empty()) builds.insert(w["build"].get<std::string>());
    return builds;
  }
};

TEST_F(Upgrade, HostsAreUpgradedOneAfterTheOtherWithoutLosingAStep) {
  make(endless());
  start_services(3);
  for (const std::string name : {"w1", "w2", "w3"}) {
    terminate_worker(name);
    c().start_worker({.name = name, .program = "remesh-worker-next"});
    // All of one build, and going on.
    const Json status = c().wait_for_status([&](const Json& s) {
      return s["state"] == "running" && s["workers"].size() == 3 &&
             running_builds(s).size() == 1;
    });
    ASSERT_FALSE(status.is_null()) << c().describe();
    ASSERT_TRUE(c().wait_for_step(c().last_step() + 3)) << c().describe();
  }
  const Json upgraded = c().wait_for_status([&](const Json& s) {
    return s["state"] == "running" &&
           running_builds(s) == std::set<std::string>{"other+2"} &&
           s["mesh"]["dp"] == 3;
  });
  EXPECT_FALSE(upgraded.is_null()) << c().describe();
  expect_no_step_lost();
  EXPECT_TRUE(c().events_named("failure").empty());
  stop_in_order();
}

// The ranks train meanwhile. Whoever goes back to the release before may.
TEST_F(Upgrade, ACoordinatorOfAnotherBuildAdoptsTheRun) {
  make(endless({{"elastic.min_slots", "2"}}));
  start_services(2);
  for (const char* program :
       {"remesh-coordinator-next", "remesh-coordinator"}) {
    kill_coordinator(SIGTERM);
    const int64_t at = c().last_step();
    c().start_coordinator({}, {}, program);
    ASSERT_TRUE(c().wait_for_step(at + 5)) << c().describe();
  }
  EXPECT_EQ(c().events_named("mesh").size(), 1U) << "nobody was disturbed";
  EXPECT_EQ(c().events_named("coordinator_restarted").size(), 2U);
  EXPECT_TRUE(c().events_named("failure").empty());
  EXPECT_TRUE(c().events_named("report_refused").empty());
  stop_and_check();
}

TEST_F(Upgrade, AWorkerOfAnotherProtocolExitsWithTheReason) {
  make(endless());
  start_services(1);
  Process& far =
      c().start_worker({.name = "far", .program = "remesh-worker-far"});
  expect_exit(far, 3);
  EXPECT_HAS(far.output(), "versions 7 to 9 of the protocol");
  ASSERT_TRUE(c().wait_for_event("report_refused"));
  EXPECT_EQ(c().events_named("report_refused")[0]["worker"], "far");
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 3)) << c().describe();
  EXPECT_EQ(c().events_named("mesh").size(), 1U) << "nobody was disturbed";
  stop_in_order();
}

}  // namespace
}  // namespace remesh::e2e
