// Several hosts, each a network namespace of its own.
#include "tests/testing/network.h"

#include <fmt/format.h>

#include <fstream>
#include <set>

#include "tests/e2e/e2e.h"
#include "tests/testing/expect.h"
#include "tests/testing/leftovers.h"

namespace remesh::e2e {
namespace {

using testing::Network;

class NetworkTest : public E2e {
 protected:
  void SetUp() override { set_up(/*ipv6=*/false); }
  void TearDown() override {
    E2e::TearDown();
    network_.reset();
  }
  void set_up(bool ipv6) {
    auto made = Network::make(3, ipv6);
    if (!made.ok()) GTEST_SKIP() << "needs netns: " << made.status().message();
    network_ = std::move(made).value();
  }

  // The coordinator on host 0, whose commands come from there.
  void start_coordinator(const std::string& bind = "tcp://0.0.0.0:5710",
                         const std::string& advertise = Network::address(0));
  // Worker w1 on host 1, w2 on host 2, with the keys of the run.
  void start(int host, testing::WorkerStart w);
  void start_worker(int host, int slots = 1);
  // Coordinator, w1 and w2, training.
  void start_two();
  // Coordinator and workers must end.
  void expect_end();
  // `remesh stop` with these options, and expect_end().
  void stop(std::vector<std::string> options = {});

  static std::string host_name(int host) { return fmt::format("host{}", host); }
  Finished on(int host, const std::vector<std::string>& command) {
    auto argv = network_->on(host);
    argv.insert(argv.end(), command.begin(), command.end());
    return testing::run_program(argv);
  }

  std::unique_ptr<Network> network_;
  std::set<std::string> workers_;
};

void NetworkTest::start_coordinator(const std::string& bind,
                                    const std::string& advertise) {
  c().run_commands_with(network_->on(0));
  // Of the same keys each time.
  (void)c().remesh({"key", "new", "coordinator", "head", c().run_dir()});
  c().start_coordinator({"--bind", bind, "--advertise", advertise},
                        network_->on(0));
}

void NetworkTest::start(int host, testing::WorkerStart w) {
  w.name = fmt::format("w{}", host);
  w.more.insert(w.more.end(), {"--key", c().run_dir() + "/keys/worker.key"});
  for (const std::string& word : network_->on(host)) w.prefix.push_back(word);
  if (w.connect.empty()) w.connect = "tcp://" + Network::address(0) + ":5710";
  c().start_worker(w);
  workers_.insert(w.name);
}

void NetworkTest::start_worker(int host, int slots) {
  start(host, {.slots = slots,
               .more = {"--interface", "10.77.0.0/24", "--mpi-ports",
                        "20000-20099", "--host-name", host_name(host)}});
}

void NetworkTest::start_two() {
  start_coordinator();
  start_worker(1);
  start_worker(2);
  ASSERT_TRUE(c().wait_for_dp(2));
}

void NetworkTest::expect_end() {
  expect_exit(c().coordinator(), 0);
  for (const std::string& w : workers_)
    EXPECT_TRUE(c().worker(w).wait_ms(kEndMs));
}

void NetworkTest::stop(std::vector<std::string> options) {
  options.insert(options.begin(), {"stop", c().run_dir()});
  expect_remesh(0, options);
  expect_end();
}

TEST_F(NetworkTest, MachinesWithOneHostNameAreSeparateHosts) {
  make(endless({{"elastic.min_slots", "2"}}));
  start_coordinator();
  for (const int host : {1, 2})
    start(host, {.prefix = {"unshare", "--uts", "sh", "-c",
                            "hostname node; exec \"$@\"", "sh"}});
  ASSERT_TRUE(c().wait_for_dp(2));
  std::set<std::string> hosts;
  const Json status = c().status();
  for (const Json& w : status["workers"]) hosts.insert(w["host"]);
  EXPECT_EQ(hosts.size(), 2U);
  stop();
  expect_sequence(c().last_step());
}

// Both hosts reach the coordinator, but their data networks do not meet.
TEST_F(NetworkTest, DisjointMpiNetworksAreNamed) {
  make(endless({{"elastic.min_slots", "2"}}));
  start_coordinator();
  for (const int host : {1, 2}) {
    const Finished added =
        on(host, {"sh", "-c",
                  fmt::format("ip link add data type bridge && ip addr add "
                              "10.78.{}.1/24 dev data && ip link set data up",
                              host)});
    ASSERT_EQ(added.exit.code, 0) << added.output;
    start(host,
          {.more = {"--interface", "data", "--host-name", host_name(host)}});
  }
  ASSERT_TRUE(c().wait_for_event("failure"));
  const std::string cause = c().events_named("failure")[0]["cause"];
  EXPECT_HAS(cause, "no route leads from the network of MPI here");
  EXPECT_HAS(cause, "10.78.1.1/24");
  EXPECT_HAS(cause, "10.78.2.1/24");
  stop({"--discard"});
}

// A step takes seconds of a link that is full of gradients meanwhile.
TEST_F(NetworkTest, ALinkSaturatedByMpiSilencesNoWorker) {
  make(endless({{"elastic.min_slots", "2"}}));
  start_two();
  ASSERT_TRUE(network_->set_rate(2, 250'000).ok());
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 1, 120'000));
  EXPECT_TRUE(c().events_named("worker_lost").empty()) << c().describe();
  network_->heal();
  stop();
}

// What the hosts do is measured when they join, and their link when the first
// mesh starts. With two microbatches a pipeline is idle for a third of a step:
// longer than gradients take over a link of the assumed speed, whatever the
// processor. Over a slow one it sends the least, unless its stages have to be
// replicated. States of such a model do not fit into a small /dev/shm.
TEST_F(NetworkTest, TheMeshFollowsTheLinkBetweenHosts) {
  make(endless({{"parallel.tensor_parallel_degree", "-1"},
                {"parallel.pipeline_parallel_degree", "-1"},
                {"elastic.min_slots", "2"},
                {"elastic.keep_state", "false"},
                {"checkpoint.interval", "0"},
                {"model.dim", "128"},
                {"model.hidden_dim", "2048"},
                {"train.seq_len", "256"},
                {"train.local_batch_size", "4"},
                {"train.global_batch_size", "8"}}));
  start_coordinator();
  for (const int host : {1, 2}) {
    ASSERT_OK(network_->set_rate(host, 40'000'000));
    start_worker(host);
  }
  ASSERT_TRUE(c().wait_for_event("training")) << c().describe();
  const Json last = c().events_named("mesh").back();
  EXPECT_EQ(last["mesh"]["pp"], 2) << last;
  ASSERT_FALSE(c().events_named("generation_ended").empty());
  const Json end = c().events_named("generation_ended")[0];
  EXPECT_EQ(end.value("detail", "").find("faster: "), 0U) << end;
  network_->heal();
  stop();
  expect_sequence(c().last_step());
}

// Two of three hosts cannot reach each other, and both reach the coordinator.
// The first hang may be a message that was lost. After more of them a mesh is
// found that does without one of the two, and no step is lost.
TEST_F(NetworkTest, ABrokenLinkBetweenTwoHostsIsFoundAndAvoided) {
  make(endless({{"checkpoint.interval", "0"}, {"elastic.hang_after_s", "5"}}));
  start_coordinator();
  for (const int host : {0, 1, 2}) start_worker(host);
  ASSERT_TRUE(c().wait_for_dp(3));
  ASSERT_OK(network_->set_loss(1, 2, 1));
  ASSERT_OK(network_->set_loss(2, 1, 1));
  ASSERT_TRUE(c().wait_for_event("host_cordoned", 1, 240'000))
      << c().describe();
  const Json e = c().events_named("host_cordoned")[0];
  EXPECT_TRUE(e["host"] == "host1" || e["host"] == "host2") << e;
  const std::string peer = e["host"] == "host1" ? "host2" : "host1";
  // Which link it is does not matter if all in question are of the host.
  const std::string detail = e.value("detail", "");
  EXPECT_EQ(detail.find("its link to "), detail.find("its link to " + peer))
      << e;
  ASSERT_TRUE(c().wait_for_dp(2, c().last_step())) << c().describe();
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 5));
  EXPECT_EQ(c().events_named("host_cordoned").size(), 1U);
  EXPECT_TRUE(c().events_named("worker_lost").empty());
  expect_no_step_lost();
  network_->heal();
  stop();
  expect_sequence(c().last_step());
}

// Nobody reaches the coordinator, for longer than a worker may be silent. The
// ranks train meanwhile, and it takes them up again as they are.
TEST_F(NetworkTest, ACoordinatorThatWasCutOffKeepsTheGeneration) {
  make(
      endless({{"elastic.min_slots", "2"}, {"elastic.dead_after_ms", "6000"}}));
  start_two();
  ASSERT_TRUE(network_->cut_off(0).ok());
  ASSERT_TRUE(c().wait_for_event("coordinator_cut_off"));
  const int64_t at = c().last_step();
  network_->heal();
  ASSERT_TRUE(c().wait_for_event("coordinator_heard"));
  ASSERT_TRUE(c().wait_for_step(at + 5));
  EXPECT_EQ(c().events_named("mesh").size(), 1U);
  EXPECT_TRUE(c().events_named("worker_lost").empty());
  EXPECT_TRUE(c().events_named("failure").empty());
  stop();
  expect_sequence(c().last_step());
}

TEST_F(NetworkTest, TrainsToTheEndOverTwoHosts) {
  make({{"train.steps", "40"}, {"elastic.min_slots", "4"}});
  start_coordinator();
  start_worker(1, 2);
  start_worker(2, 2);
  expect_end();
  expect_sequence(40);
  for (const Json& m : c().metrics()) EXPECT_EQ(m["mesh"]["dp"], 4);
}

TEST_F(NetworkTest, SurvivesAKilledRankAndAHostThatIsCutOff) {
  make(endless(
      {{"checkpoint.interval", "5"}, {"elastic.dead_after_ms", "6000"}}));
  start_two();
  ASSERT_TRUE(c().wait_for_event("checkpoint"));
  ASSERT_EQ(c().ranks().size(), 2U);
  for (const Cluster::Rank& r : c().ranks()) {
    const auto at = testing::listeners_of(r.pid);
    EXPECT_EQ(at.size(), 2U);
    for (const std::string& a : at)
      EXPECT_TRUE((a.starts_with("10.77.0.") || a.starts_with("[::1]")) &&
                  a.substr(a.rfind(':') + 1).starts_with("200"))
          << a;
  }
  // Commands run on the coordinator's host.
  const auto ranks = testing::processes_with(c().folder());
  pid_t rank = 0;
  for (const auto& p : ranks)
    if (p.command.find("remesh-trainer") != std::string::npos &&
        p.parent == c().worker("w2").pid())
      rank = p.pid;
  ASSERT_GT(rank, 0);
  int64_t at = c().last_step();
  testing::send_signal(rank, SIGKILL);
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
  stop();
  expect_sequence(c().last_step());
}

class WireGuardTest : public NetworkTest {
 protected:
  void start_worker(int host, bool with = true) {
    std::vector<std::string> more = {"--host-name", host_name(host)};
    if (with) more.insert(more.end(), {"--wireguard", "0"});
    start(host, {.more = more});
  }
  void start_two(bool with = true) {
    start_coordinator();
    start_worker(1);
    start_worker(2, with);
  }
  void stop() {
    NetworkTest::stop();
    for (const int host : {1, 2})
      EXPECT_EQ(on(host, {"wg", "show", "interfaces"}).output, "");
  }
};

// Of a peer that it connects to.
constexpr const char* kReadOneByte = R"(import socket, sys
s = socket.create_connection((sys.argv[1], sys.argv[2]), 60)
try:
  print('read', s.recv(1))
except ConnectionResetError:
  print('read', b'')
)";

// Nothing of MPI passes between the hosts but in packets of WireGuard.
TEST_F(WireGuardTest, CarriesTheTrafficOfRanks) {
  ASSERT_OK(network_->set_dropped("meta l4proto tcp"));
  make(endless({{"elastic.min_slots", "2"}}));
  start_two();
  ASSERT_TRUE(c().wait_for_dp(2));
  for (const char* lost : {"rank", "worker"}) {
    const int64_t at = c().last_step();
    if (*lost == 'r') {
      testing::send_signal(c().ranks().front().pid, SIGKILL);
    } else {
      c().worker("w2").kill(SIGKILL);
      c().worker("w2").wait_ms(5'000);
      start_worker(2);
    }
    ASSERT_TRUE(c().wait_for_event("failure", *lost == 'r' ? 1 : 2));
    ASSERT_TRUE(c().wait_for_dp(2, at + 3)) << lost;
  }
  expect_sequence(c().last_step());
  stop();
}

// A host takes packets for its address in the tunnel on its other interfaces,
// too: the connection comes about, and is closed.
TEST_F(WireGuardTest, RanksAreUnreachableFromOutside) {
  make(endless({{"elastic.min_slots", "2"}}));
  start_two();
  ASSERT_TRUE(c().wait_for_dp(2));
  for (const int host : {0, 1})
    on(host, {"ip", "addr", "add", Network::address6(host) + "/64", "dev",
              "lan", "nodad"});
  const std::string mac =
      on(1, {"cat", "/sys/class/net/lan/address"}).output.substr(0, 17);
  int tried = 0;
  for (const Cluster::Rank& r : c().ranks())
    for (const std::string& at : testing::listeners_of(r.pid)) {
      EXPECT_TRUE(at.starts_with("[fd72:6d73:") || at.starts_with("127.0.0.1"))
          << at;
      if (r.worker != "w1" || !at.starts_with("[fd72")) continue;
      const size_t end = at.find(']');
      const std::string address = at.substr(1, end - 1);
      on(0, {"ip", "-6", "route", "replace", address, "dev", "lan"});
      on(0, {"ip", "-6", "neigh", "replace", address, "lladdr", mac, "dev",
             "lan"});
      const Finished f =
          on(0, {"python3", "-c", kReadOneByte, address, at.substr(end + 2)});
      EXPECT_EQ(f.output, "read b''\n");
      ++tried;
    }
  EXPECT_EQ(tried, 1);
  EXPECT_TRUE(c().wait_for_step(c().last_step() + 5));
  EXPECT_EQ(c().events_named("failure").size(), 0U);
  stop();
}

// As by a network manager, or by the kernel if wireguard-go was killed.
TEST_F(WireGuardTest, AnInterfaceThatWasRemovedIsMadeAgain) {
  make(endless({{"elastic.min_slots", "2"}}));
  start_two();
  ASSERT_TRUE(c().wait_for_dp(2));
  const Finished deleted =
      on(2, {"sh", "-c", "cd /sys/class/net && ip link del rm*"});
  EXPECT_EQ(deleted.exit.code, 0) << deleted.output;
  const int64_t at = c().last_step();
  testing::send_signal(c().ranks().front().pid, SIGKILL);
  ASSERT_TRUE(c().wait_for_dp(2, at + 3));
  EXPECT_EQ(c().events_named("failure").size(), 1U);
  stop();
}

TEST_F(WireGuardTest, AWorkerWithoutWireGuardIsNamed) {
  make(endless({{"elastic.min_slots", "2"}}));
  start_two(/*with=*/false);
  ASSERT_TRUE(c().wait_for_event("failure"));
  const std::string cause = c().events_named("failure")[0]["cause"];
  EXPECT_HAS(cause, "--wireguard");
  EXPECT_EQ(c().last_step(), 0);
  stop();
}

class Ipv6Test : public NetworkTest {
  void SetUp() override { set_up(/*ipv6=*/true); }
};

// One worker is given the coordinator's address, the other a name that has an
// IPv6 address only.
TEST_F(Ipv6Test, HostsWithoutIpv4TrainTogether) {
  make(endless({{"elastic.min_slots", "2"}}));
  const std::string head = "[" + Network::address6(0) + "]";
  start_coordinator("tcp://[::]:5710", head);
  start(1, {.more = {"--host-name", "host1"},
            .connect = "tcp://" + head + ":5710"});
  const std::string hosts = c().folder() + "/hosts";
  std::ofstream(hosts) << Network::address6(0) << " head\n";
  start(2,
        {.more = {"--host-name", "host2"},
         .prefix = {"unshare", "--mount", "sh", "-c",
                    "mount --bind " + hosts + " /etc/hosts; exec \"$@\"", "sh"},
         .connect = "tcp://head:5710"});
  ASSERT_TRUE(c().wait_for_dp(2));
  ASSERT_EQ(c().ranks().size(), 2U);
  for (const Cluster::Rank& r : c().ranks())
    for (const std::string& at : testing::listeners_of(r.pid))
      EXPECT_TRUE(at.starts_with("[fd77::") || at.starts_with("127.0.0.1"))
          << at;
  stop();
  expect_sequence(c().last_step());
}

}  // namespace
}  // namespace remesh::e2e
