// Several hosts, each a network namespace of its own.
#include "tests/testing/network.h"

#include <fmt/format.h>

#include "tests/e2e/e2e.h"

namespace remesh::e2e {
namespace {

using testing::Network;

class NetworkTest : public E2e {
 protected:
  void SetUp() override {
    auto made = Network::make(3);
    if (!made.ok()) GTEST_SKIP() << made.status().message();
    network_ = std::move(made).value();
  }
  void TearDown() override {
    E2e::TearDown();
    network_.reset();
  }
  // The coordinator on host 0.
  void start_coordinator();
  // Worker w1 on host 1, w2 on host 2.
  void start_worker(int host, int slots = 1);

  std::unique_ptr<Network> network_;
};

void NetworkTest::start_coordinator() {
  c().start_coordinator(
      {"--bind", "tcp://0.0.0.0:5710", "--advertise", Network::address(0)},
      network_->on(0));
}

void NetworkTest::start_worker(int host, int slots) {
  const std::string name = fmt::format("w{}", host);
  c().start_worker({.name = name,
                    .slots = slots,
                    .more = {"--interface", "10.77.0.0/24", "--host-name",
                             fmt::format("host{}", host)},
                    .prefix = network_->on(host),
                    .connect = "tcp://" + Network::address(0) + ":5710"});
}

TEST_F(NetworkTest, TrainsToTheEndOverTwoHosts) {
  make({{"train.steps", "40"}, {"elastic.min_slots", "4"}});
  start_coordinator();
  start_worker(1, 2);
  start_worker(2, 2);
  expect_exit(c().coordinator(), 0, 60'000);
  expect_sequence(40);
  for (const Json& m : c().metrics()) EXPECT_EQ(m["mesh"]["dp"], 4);
  for (const char* w : {"w1", "w2"}) EXPECT_TRUE(c().worker(w).wait_ms(10'000));
}

TEST_F(NetworkTest, AKilledRankAndAHostThatIsCutOff) {
  make(endless({{"checkpoint.interval", "5"}}));
  start_coordinator();
  start_worker(1);
  start_worker(2);
  ASSERT_TRUE(c().wait_for_dp(2));
  ASSERT_TRUE(c().wait_for_event("checkpoint"));
  // Commands run on the coordinator's host.
  const auto ranks = testing::processes_with(c().folder());
  pid_t rank = 0;
  for (const auto& p : ranks)
    if (p.command.find("remesh-trainer") != std::string::npos &&
        p.parent == c().worker("w2").pid())
      rank = p.pid;
  ASSERT_GT(rank, 0);
  int64_t at = c().last_step();
  kill(rank, SIGKILL);
  ASSERT_TRUE(c().wait_for_event("failure"));
  EXPECT_EQ(c().events_named("failure")[0]["worker"], "w2");
  ASSERT_TRUE(c().wait_for_dp(2, at));
  // Disconnect the host: the other continues, and takes it back afterwards.
  network_->set_link(2, false);
  ASSERT_TRUE(c().wait_for_dp(1));
  EXPECT_EQ(c().events_named("failure").back()["worker"], "w2");
  at = c().last_step();
  network_->set_link(2, true);
  ASSERT_TRUE(c().wait_for_dp(2, at));
  // Stop from a remote host.
  auto argv = network_->on(0);
  argv.insert(argv.end(), {testing::program("remesh"), "stop", c().run_dir()});
  const Finished stop = testing::run_program(argv);
  EXPECT_EQ(stop.exit.code, 0) << stop.output;
  expect_exit(c().coordinator(), 0);
  for (const char* w : {"w1", "w2"}) EXPECT_TRUE(c().worker(w).wait_ms(10'000));
  expect_sequence(c().last_step());
}

}  // namespace
}  // namespace remesh::e2e
