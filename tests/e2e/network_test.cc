// Several hosts, each a network namespace of its own.
#include "tests/testing/network.h"

#include <fmt/format.h>

#include <fstream>
#include <set>

#include "tests/e2e/e2e.h"
#include "tests/testing/leftovers.h"

namespace remesh::e2e {
namespace {

using testing::Network;

class NetworkTest : public E2e {
 protected:
  void SetUp() override {
    auto made = Network::make(3);
    if (!made.ok()) GTEST_SKIP() << "needs netns: " << made.status().message();
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
  // The same as machines that are all called localhost.
  void start_worker_of_node(int host);

  // From the coordinator's host.
  void stop(const std::vector<std::string>& options = {});

  std::string key_file() { return c().run_dir() + "/keys/worker.key"; }

  std::unique_ptr<Network> network_;
};

void NetworkTest::start_coordinator() {
  // Of the same keys each time.
  (void)c().remesh({"key", "new", "coordinator", "head", c().run_dir()});
  c().start_coordinator(
      {"--bind", "tcp://0.0.0.0:5710", "--advertise", Network::address(0)},
      network_->on(0));
}

void NetworkTest::start_worker(int host, int slots) {
  const std::string name = fmt::format("w{}", host);
  c().start_worker({.name = name,
                    .slots = slots,
                    .more = {"--key", key_file(), "--interface", "10.77.0.0/24",
                             "--mpi-ports", "20000-20099", "--host-name",
                             fmt::format("host{}", host)},
                    .prefix = network_->on(host),
                    .connect = "tcp://" + Network::address(0) + ":5710"});
}

void NetworkTest::start_worker_of_node(int host) {
  std::vector<std::string> prefix = {
      "unshare", "--uts", "sh", "-c", "hostname node; exec \"$@\"", "sh"};
  const std::vector<std::string> on = network_->on(host);
  prefix.insert(prefix.end(), on.begin(), on.end());
  c().start_worker({.name = fmt::format("w{}", host),
                    .more = {"--key", key_file()},
                    .prefix = prefix,
                    .connect = "tcp://" + Network::address(0) + ":5710"});
}

void NetworkTest::stop(const std::vector<std::string>& options) {
  auto argv = network_->on(0);
  argv.insert(argv.end(), {testing::program("remesh"), "stop", c().run_dir()});
  argv.insert(argv.end(), options.begin(), options.end());
  const Finished f = testing::run_program(argv);
  EXPECT_EQ(f.exit.code, 0) << f.output;
  expect_exit(c().coordinator(), 0);
}

TEST_F(NetworkTest, MachinesWithOneHostNameAreSeparateHosts) {
  make(endless({{"elastic.min_slots", "2"}}));
  start_coordinator();
  start_worker_of_node(1);
  start_worker_of_node(2);
  ASSERT_TRUE(c().wait_for_dp(2));
  std::set<std::string> hosts;
  auto argv = network_->on(0);
  argv.insert(argv.end(),
              {testing::program("remesh"), "status", c().run_dir(), "--json"});
  const Json status = Json::parse(testing::run_program(argv).output);
  for (const Json& w : status["workers"]) hosts.insert(w["host"]);
  EXPECT_EQ(hosts.size(), 2U);
  stop();
  expect_sequence(c().last_step());
  for (const char* w : {"w1", "w2"}) EXPECT_TRUE(c().worker(w).wait_ms(kEndMs));
}

// Both hosts reach the coordinator, but their data networks do not meet.
TEST_F(NetworkTest, DisjointMpiNetworksAreNamed) {
  make(endless({{"elastic.min_slots", "2"}}));
  start_coordinator();
  for (const int host : {1, 2}) {
    auto add = network_->on(host);
    add.insert(add.end(),
               {"sh", "-c",
                fmt::format("ip link add data type bridge && ip addr add "
                            "10.78.{}.1/24 dev data && ip link set data up",
                            host)});
    const Finished added = testing::run_program(add);
    ASSERT_EQ(added.exit.code, 0) << added.output;
    c().start_worker({.name = fmt::format("w{}", host),
                      .more = {"--key", key_file(), "--interface", "data",
                               "--host-name", fmt::format("host{}", host)},
                      .prefix = network_->on(host),
                      .connect = "tcp://" + Network::address(0) + ":5710"});
  }
  ASSERT_TRUE(c().wait_for_event("failure"));
  const std::string cause = c().events_named("failure")[0]["cause"];
  EXPECT_NE(cause.find("no route leads from the network of MPI here"),
            std::string::npos)
      << cause;
  EXPECT_NE(cause.find("10.78.1.1/24"), std::string::npos) << cause;
  EXPECT_NE(cause.find("10.78.2.1/24"), std::string::npos) << cause;
  stop({"--discard"});
  for (const char* w : {"w1", "w2"}) EXPECT_TRUE(c().worker(w).wait_ms(kEndMs));
}

// A step takes seconds of a link that is full of gradients meanwhile.
TEST_F(NetworkTest, ALinkSaturatedByMpiSilencesNoWorker) {
  make(endless({{"elastic.min_slots", "2"}}));
  start_coordinator();
  start_worker(1);
  start_worker(2);
  ASSERT_TRUE(c().wait_for_dp(2));
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
    ASSERT_TRUE(network_->set_rate(host, 40'000'000).ok());
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
  ASSERT_TRUE(network_->set_loss(1, 2, 1).ok());
  ASSERT_TRUE(network_->set_loss(2, 1, 1).ok());
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
  for (const Json& mesh : c().events_named("mesh"))
    EXPECT_EQ(lost_steps(mesh), 0) << mesh;
  network_->heal();
  stop();
  expect_sequence(c().last_step());
  for (const char* w : {"w0", "w1", "w2"})
    EXPECT_TRUE(c().worker(w).wait_ms(kEndMs));
}

// Nobody reaches the coordinator, for longer than a worker may be silent. The
// ranks train meanwhile, and it takes them up again as they are.
TEST_F(NetworkTest, ACoordinatorThatWasCutOffKeepsTheGeneration) {
  make(
      endless({{"elastic.min_slots", "2"}, {"elastic.dead_after_ms", "6000"}}));
  start_coordinator();
  start_worker(1);
  start_worker(2);
  ASSERT_TRUE(c().wait_for_dp(2));
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
  for (const char* w : {"w1", "w2"}) EXPECT_TRUE(c().worker(w).wait_ms(kEndMs));
}

TEST_F(NetworkTest, TrainsToTheEndOverTwoHosts) {
  make({{"train.steps", "40"}, {"elastic.min_slots", "4"}});
  start_coordinator();
  start_worker(1, 2);
  start_worker(2, 2);
  expect_exit(c().coordinator(), 0, 60'000);
  expect_sequence(40);
  for (const Json& m : c().metrics()) EXPECT_EQ(m["mesh"]["dp"], 4);
  for (const char* w : {"w1", "w2"}) EXPECT_TRUE(c().worker(w).wait_ms(kEndMs));
}

TEST_F(NetworkTest, SurvivesAKilledRankAndAHostThatIsCutOff) {
  make(endless(
      {{"checkpoint.interval", "5"}, {"elastic.dead_after_ms", "6000"}}));
  start_coordinator();
  start_worker(1);
  start_worker(2);
  ASSERT_TRUE(c().wait_for_dp(2));
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
  for (const char* w : {"w1", "w2"}) EXPECT_TRUE(c().worker(w).wait_ms(kEndMs));
  expect_sequence(c().last_step());
}

class WireGuardTest : public NetworkTest {
 protected:
  void start(int host, bool with = true) {
    std::vector<std::string> more = {"--key", key_file(), "--host-name",
                                     fmt::format("host{}", host)};
    if (with) more.insert(more.end(), {"--wireguard", "0"});
    c().start_worker({.name = fmt::format("w{}", host),
                      .more = more,
                      .prefix = network_->on(host),
                      .connect = "tcp://" + Network::address(0) + ":5710"});
  }
  Finished on(int host, const std::vector<std::string>& command) {
    auto argv = network_->on(host);
    argv.insert(argv.end(), command.begin(), command.end());
    return testing::run_program(argv);
  }
  void stop() {
    const Finished f =
        on(0, {testing::program("remesh"), "stop", c().run_dir()});
    EXPECT_EQ(f.exit.code, 0) << f.output;
    expect_exit(c().coordinator(), 0);
    for (const char* w : {"w1", "w2"})
      EXPECT_TRUE(c().worker(w).wait_ms(kEndMs));
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
  ASSERT_TRUE(network_->set_dropped("meta l4proto tcp").ok());
  make(endless({{"elastic.min_slots", "2"}}));
  start_coordinator();
  start(1);
  start(2);
  ASSERT_TRUE(c().wait_for_dp(2));
  for (const char* lost : {"rank", "worker"}) {
    const int64_t at = c().last_step();
    if (*lost == 'r') {
      testing::send_signal(c().ranks().front().pid, SIGKILL);
    } else {
      c().worker("w2").kill(SIGKILL);
      c().worker("w2").wait_ms(5'000);
      start(2);
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
  start_coordinator();
  start(1);
  start(2);
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
  const int64_t at = c().last_step();
  EXPECT_TRUE(c().wait_for_step(at + 5));
  EXPECT_EQ(c().events_named("failure").size(), 0U);
  stop();
}

TEST_F(WireGuardTest, AWorkerWithoutWireGuardIsNamed) {
  make(endless({{"elastic.min_slots", "2"}}));
  start_coordinator();
  start(1);
  start(2, /*with=*/false);
  ASSERT_TRUE(c().wait_for_event("failure"));
  const std::string cause = c().events_named("failure")[0]["cause"];
  EXPECT_NE(cause.find("--wireguard"), std::string::npos) << cause;
  EXPECT_EQ(c().last_step(), 0);
  stop();
}

class Ipv6Test : public E2e {};

// One worker is given the coordinator's address, the other a name that has an
// IPv6 address only.
TEST_F(Ipv6Test, HostsWithoutIpv4TrainTogether) {
  auto made = Network::make(3, /*ipv6=*/true);
  if (!made.ok()) GTEST_SKIP() << "needs netns: " << made.status().message();
  const std::unique_ptr<Network> network = std::move(made).value();
  make(endless({{"elastic.min_slots", "2"}}));
  (void)c().remesh({"key", "new", "coordinator", "head", c().run_dir()});
  const std::string key = c().run_dir() + "/keys/worker.key";
  c().start_coordinator({"--bind", "tcp://[::]:5710", "--advertise",
                         "[" + Network::address6(0) + "]"},
                        network->on(0));
  c().start_worker({.name = "w1",
                    .more = {"--key", key, "--host-name", "host1"},
                    .prefix = network->on(1),
                    .connect = "tcp://[" + Network::address6(0) + "]:5710"});
  const std::string hosts = c().folder() + "/hosts";
  std::ofstream(hosts) << Network::address6(0) << " head\n";
  std::vector<std::string> prefix = {
      "unshare",
      "--mount",
      "sh",
      "-c",
      "mount --bind " + hosts + " /etc/hosts; exec \"$@\"",
      "sh"};
  for (const std::string& a : network->on(2)) prefix.push_back(a);
  c().start_worker({.name = "w2",
                    .more = {"--key", key, "--host-name", "host2"},
                    .prefix = prefix,
                    .connect = "tcp://head:5710"});
  ASSERT_TRUE(c().wait_for_dp(2));
  ASSERT_EQ(c().ranks().size(), 2U);
  for (const Cluster::Rank& r : c().ranks())
    for (const std::string& at : testing::listeners_of(r.pid))
      EXPECT_TRUE(at.starts_with("[fd77::") || at.starts_with("127.0.0.1"))
          << at;
  auto argv = network->on(0);
  argv.insert(argv.end(), {testing::program("remesh"), "stop", c().run_dir()});
  const Finished stop = testing::run_program(argv);
  EXPECT_EQ(stop.exit.code, 0) << stop.output;
  expect_exit(c().coordinator(), 0);
  for (const char* w : {"w1", "w2"}) EXPECT_TRUE(c().worker(w).wait_ms(kEndMs));
  expect_sequence(c().last_step());
  E2e::TearDown();  // before the network ends
}

}  // namespace
}  // namespace remesh::e2e
