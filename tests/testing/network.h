// A network of several simulated hosts: Linux network namespaces (ip-netns(8))
// connected by a bridge in the first of them, so that the machine's own network
// is not touched. Needs root.
//
// Ownership: the destructor removes the namespaces and kills their processes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "proto/base/status.h"

namespace remesh::testing {

class Network {
 public:
  // Unavailable, with the output of ip, if it is not permitted.
  // With `ipv6` the hosts have IPv6 addresses only.
  static Result<std::unique_ptr<Network>> make(int hosts, bool ipv6 = false);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // Arguments that run the program after them on that host.
  std::vector<std::string> on(int host) const;
  // Its address, "10.77.0.(host + 1)".
  static std::string address(int host);
  // With ipv6: "fd77::(host + 1)".
  static std::string address6(int host);
  // Disconnects a host, or connects it again.
  void set_link(int host, bool up);
  // Drops this share of the packets from one host to another: 1 cuts that
  // direction, 0 restores it. Needs nft(8).
  Status set_loss(int from, int to, double share);
  // Cuts a host off from all others at once, in both directions.
  Status cut_off(int host);
  // Drops what the hosts other than 0 send each other and matches this
  // expression of nft(8): "meta l4proto tcp".
  Status set_dropped(const std::string& match);
  // Limits what a host sends and what it receives, each to this many bits a
  // second; 0: no limit. Needs tc(8).
  Status set_rate(int host, int64_t bits_per_second);
  // Restores all links.
  void heal();

 private:
  Network() = default;
  Status add_host(int host);
  Status apply_losses();
  std::string rule(int from, int to, double share) const;
  std::map<std::pair<int, int>, double> losses_;  // (from, to) -> share
  std::string dropped_;
  std::vector<std::string> names_;
  bool ipv6_ = false;
};

}  // namespace remesh::testing
