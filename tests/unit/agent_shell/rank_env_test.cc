// What ranks are told: their environment and the networks between hosts.
#include "worker/agent/shell/rank_env.h"

#include <arpa/inet.h>
#include <sys/socket.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "proto/base/descriptor.h"
#include "tests/testing/expect.h"
#include "worker/agent/shell/wireguard.h"

namespace remesh::agent {
namespace {

bool has(const std::vector<std::string>& env, const std::string& entry) {
  return std::count(env.begin(), env.end(), entry) == 1;
}

TEST(RankEnv, VariablesOfOtherLaunchersAreRemoved) {
  MpiSettings s;
  s.shared_folder = "/shm/x";
  s.tcp =
      MpiNetwork{.interfaces = "lo", .listen = "127.0.0.1", .unused_family = 6};
  s.ports = {20000, 20099};
  s.threads = 3;
  const auto env = rank_environment(
      {"HOME=/root", "SLURM_JOB_ID=1", "PMI_RANK=0", "PMIX_RANK=4",
       "OMPI_MCA_btl=tcp", "REMESH_LISTEN=0.0.0.0", "REMESH_PEERS=::/0",
       "OMP_NUM_THREADS=64", "FLUX_X=1", "PATH=/bin"},
      {"PMIX_RANK=2", "PMIX_NAMESPACE=job.g1"}, s);
  EXPECT_TRUE(has(env, "HOME=/root"));
  EXPECT_TRUE(has(env, "PATH=/bin"));
  EXPECT_TRUE(has(env, "PMIX_RANK=2"));
  EXPECT_TRUE(has(env, "OMPI_MCA_btl=self,vader,tcp"));
  EXPECT_TRUE(has(env, "OMPI_MCA_btl_tcp_if_include=lo"));
  EXPECT_TRUE(has(env, "OMPI_MCA_btl_tcp_disable_family=6"));
  EXPECT_TRUE(has(env, "OMPI_MCA_btl_tcp_port_min_v4=20000"));
  EXPECT_TRUE(has(env, "OMPI_MCA_btl_tcp_port_range_v6=100"));
  EXPECT_TRUE(has(env, "REMESH_LISTEN=127.0.0.1"));
  EXPECT_FALSE(has(env, "REMESH_PEERS=::/0"));
  EXPECT_TRUE(has(env, "OMPI_MCA_btl_vader_backing_directory=/shm/x"));
  EXPECT_TRUE(has(env, "OMP_NUM_THREADS=3"));
  std::set<std::string> keys;
  for (const std::string& e : env) {
    EXPECT_LACKS(e, "SLURM");
    EXPECT_LACKS(e, "FLUX");
    EXPECT_TRUE(keys.insert(e.substr(0, e.find('='))).second) << e;
  }
  EXPECT_FALSE(keys.contains("OMP_WAIT_POLICY"));
  s.sleep_when_idle = true;
  EXPECT_TRUE(has(rank_environment({"OMP_WAIT_POLICY=active"}, {}, s),
                  "OMP_WAIT_POLICY=passive"));
  s.tcp.reset();
  const auto alone = rank_environment({}, {}, s);
  EXPECT_TRUE(has(alone, "OMPI_MCA_btl=self,vader"));
  for (const std::string& e : alone) EXPECT_LACKS(e, "btl_tcp");
}

TEST(RankEnv, NetworksOfThisHostAreFound) {
  MpiNetwork lo = mpi_network("lo");
  EXPECT_EQ(lo.interfaces, "lo");
  EXPECT_EQ(lo.listen, "127.0.0.1");
  EXPECT_EQ(lo.unused_family, 6);
  EXPECT_EQ(mpi_network("127.0.0.0/8").listen, "127.0.0.1");
  EXPECT_EQ(mpi_network("127.0.0.0/8").interfaces, "127.0.0.0/8");
  lo = mpi_network("::1/128");
  EXPECT_EQ(lo.interfaces, "lo");  // Open MPI takes no CIDRs of IPv6
  EXPECT_EQ(lo.listen, "::1");
  EXPECT_EQ(lo.unused_family, 4);
  EXPECT_EQ(mpi_network("lo,127.0.0.0/8").listen, "127.0.0.1");
  EXPECT_EQ(mpi_network("").unused_family, 0);
  EXPECT_OK(check_listens(lo, "lo"));
  EXPECT_SAYS(check_listens(mpi_network(""), ""), "give --interface");
  // No interface can have this address.
  EXPECT_EQ(mpi_network("255.255.255.255/32").listen, "");
}

TEST(RankEnv, PortsThatOthersHaveAreNamed) {
  const MpiNetwork lo = mpi_network("lo");
  const Descriptor other(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at{.sin_family = AF_INET};
  socklen_t size = sizeof(at);
  auto* const address = reinterpret_cast<sockaddr*>(&at);
  ASSERT_EQ(bind(other.get(), address, size), 0);
  ASSERT_EQ(getsockname(other.get(), address, &size), 0);
  const int port = ntohs(at.sin_port);
  EXPECT_SAYS(check_ports(lo, {port, port}, 1),
              "0 of them are free on this host");
  EXPECT_OK(check_ports(lo, {port, port}, 0));
  EXPECT_OK(check_ports(lo, PortRange(), 1));
}

TEST(RankEnv, WorkersExchangeTheirNetworksInAFence) {
  MpiNetwork lo = mpi_network("lo");
  EXPECT_EQ(lo.addresses, std::vector<std::string>{"127.0.0.1/8"});
  const std::string all =
      with_network("one", "a", lo) + with_network("", "b", MpiNetwork{}) +
      with_network("RMNW three", "c", {.addresses = {"192.0.2.7/24"}});
  const FenceNetworks fence = split_networks(all);
  EXPECT_EQ(fence.blob, "oneRMNW three");
  EXPECT_EQ(fence.addresses.at("a"), lo.addresses);
  EXPECT_FALSE(fence.addresses.contains("b"));  // names none
  for (size_t n = 0; n <= all.size(); ++n)
    (void)split_networks(std::string_view(all).substr(0, n));
  EXPECT_EQ(split_networks("plain").blob, "plain");
  EXPECT_EQ(why_apart(lo.addresses, {{"a", {"127.0.0.2/8"}}}), "");
  EXPECT_EQ(why_apart({}, fence.addresses), "");
  EXPECT_HAS(why_apart(lo.addresses, {{"c", {"192.0.2.7/24"}}}), "worker c");
  EXPECT_HAS(why_apart(lo.addresses, {{"d", {"localhost"}}}), "worker d");
}

TEST(RankEnv, TunnelEndpointsAreExchanged) {
  const std::string key = "AbCdEfGhIjKlMnOpQrStUvWxYz0123456789+/AbCdE=";
  const MpiNetwork net{.addresses = {tunnel_address(key) + "/32"},
                       .tunnel = key + ",192.0.2.7:51820"};
  const FenceNetworks fence = split_networks(
      with_network("one", "a", net) +
      with_network("two", "b", MpiNetwork{.addresses = {"192.0.2.7/24"}}));
  EXPECT_EQ(fence.blob, "onetwo");
  EXPECT_EQ(fence.tunnels.at("a"), net.tunnel);
  EXPECT_EQ(fence.addresses.at("a"), net.addresses);
  EXPECT_EQ(fence.tunnels.at("b"), "");
  ASSERT_OK_AND(const auto end, parse_tunnel(net.tunnel));
  EXPECT_EQ(end.key, key);
  EXPECT_EQ(end.endpoint, "192.0.2.7:51820");
  EXPECT_OK(parse_tunnel(key + ",[fd00::7]:9"));
  for (const std::string& bad :
       {key, key + ",", key + ",host:9", key + ",192.0.2.7:0",
        key + ",192.0.2.7:65536", key + ",fd00::7:9", key + ",192.0.2.7:9\nX=",
        key.substr(1) + ",192.0.2.7:9", "\n" + net.tunnel})
    EXPECT_FALSE(parse_tunnel(bad).ok()) << bad;
  // The first 12 bytes of the key: 01 b0 9d 11 f1 a1 ...
  EXPECT_EQ(tunnel_address(key), "fd72:6d73:1b0:9d11:f1a1:2232:a532:73a9");
}

TEST(RankEnv, PortsAreARangeThatUsersMayUse) {
  EXPECT_EQ(parse_ports("20000-20999")->first, 20000);
  EXPECT_EQ(parse_ports("20000-20999")->last, 20999);
  for (const char* bad : {"", "20000", "20000-", "1000-2000", "3000-2000",
                          "20000-70000", "20000-20999x", "-1-5"})
    EXPECT_FALSE(parse_ports(bad).ok()) << bad;
}

pb::Assignment two_workers(const std::string& host_a,
                           const std::string& host_b) {
  pb::Assignment a;
  a.set_generation(1);
  for (const char* w : {"a", "spare", "b"}) a.add_workers(w);
  a.add_hosts(host_a);
  a.add_hosts("far");
  a.add_hosts(host_b);
  for (int r = 0; r < 3; ++r) {
    auto* p = a.add_ranks();
    p->set_rank(r);
    p->set_worker(r < 2 ? "b" : "a");
    p->set_threads(2);
  }
  return a;
}

TEST(RankEnv, PlacementFollowsTheAssignment) {
  ASSERT_OK_AND(auto p, place(two_workers("h", "h"), "b"));
  EXPECT_TRUE(p.one_host);  // the spare has no ranks
  EXPECT_EQ(p.wanted_cores, 6);
  ASSERT_EQ(p.local.size(), 2u);
  EXPECT_EQ(p.local[1].rank, 1);
  EXPECT_EQ(p.local[1].threads, 2);
  ASSERT_EQ(p.nodes.size(), 2u);
  EXPECT_EQ(p.nodes[0].name, "a");
  EXPECT_EQ(p.nodes[0].ranks, std::vector<int>{2});
  EXPECT_EQ(p.nodes[1].ranks, (std::vector<int>{0, 1}));
  EXPECT_EQ(place(two_workers("h", "i"), "b")->wanted_cores, 4);
  EXPECT_FALSE(place(two_workers("h", "i"), "b")->one_host);
  EXPECT_TRUE(place(two_workers("h", "i"), "spare")->local.empty());
}

TEST(RankEnv, InvalidAssignmentsAreNamed) {
  auto a = two_workers("h", "h");
  a.mutable_ranks(1)->set_rank(0);
  EXPECT_FALSE(place(a, "a").ok());
  a.mutable_ranks(1)->set_rank(-1);
  EXPECT_FALSE(place(a, "a").ok());
  a.mutable_ranks(1)->set_rank(3);
  EXPECT_FALSE(place(a, "a").ok());
  a.mutable_ranks(1)->set_rank(1);
  EXPECT_OK(place(a, "a"));
  a.mutable_ranks(1)->set_worker("x");
  EXPECT_SAYS(place(a, "a"), "'x'");
}

TEST(RankEnv, NetworkTowardsThisHostIsThatOfTheDefaultRoute) {
  const std::string outside = network_towards("tcp://192.0.2.1:5710");
  EXPECT_EQ(network_towards("tcp://127.0.1.1:5710"), outside);
  EXPECT_EQ(network_towards("tcp://localhost:5710"), outside);
  EXPECT_FALSE(outside.starts_with("127."));
  EXPECT_EQ(network_towards("nonsense"), "");
}

}  // namespace
}  // namespace remesh::agent
