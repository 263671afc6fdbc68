// The part of this host's network that MPI uses, and whether it meets that of
// the other hosts.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"

namespace remesh::agent {

// TCP ports from `first` to `last`; 0: any.
struct PortRange {
  int first = 0;
  int last = 0;
};
// "FIRST-LAST".
Result<PortRange> parse_ports(const std::string& text);

// What MPI uses of this host's network.
struct MpiNetwork {
  // Names of interfaces or IPv4 CIDRs, comma-separated.
  std::string interfaces;
  std::string listen;  // addresses to listen on, comma-separated; "": all
  // Addresses of this host in them, as CIDRs.
  std::vector<std::string> addresses;
  int unused_family = 0;  // 4 or 6: IPv4 or IPv6; 0: both are used
  // With a WireGuard interface (wireguard.h): this end of the tunnels, and the
  // network of which ranks accept connections; else "".
  std::string tunnel;
  std::string peers_within;
};
// For `interfaces` as a user gives them: names, IPv4 or IPv6 CIDRs. IPv4 if
// they have an IPv4 address, else IPv6.
MpiNetwork mpi_network(const std::string& interfaces);
// Unavailable if none of the addresses is there: MPI would listen on all.
Status check_listens(const MpiNetwork& network, const std::string& interfaces);
// Unavailable if other programs leave fewer of the ports than there are ranks.
Status check_ports(const MpiNetwork& network, const PortRange& ports,
                   size_t ranks);

// The interface used to reach `address` (tcp://HOST:PORT), or that of the
// default route if it is this host: its network (CIDR) for IPv4, its name for
// IPv6. "" if it cannot be determined.
std::string network_towards(const std::string& address);

// Workers tell each other their networks with the addresses of their ranks, in
// the first fence of a generation: `blob` with those of `worker` before it.
std::string with_network(const std::string& blob, const std::string& worker,
                         const MpiNetwork& network);
struct FenceNetworks {
  std::string blob;  // of all workers, without the networks
  std::map<std::string, std::vector<std::string>> addresses;  // by worker
  std::map<std::string, std::string> tunnels;  // by worker; "": it has none
};
FenceNetworks split_networks(std::string_view all);
// Why ranks that have the addresses `own` cannot reach one of `others`; "" if
// they can, as far as the routes of this host tell.
std::string why_apart(
    const std::vector<std::string>& own,
    const std::map<std::string, std::vector<std::string>>& others);

}  // namespace remesh::agent
