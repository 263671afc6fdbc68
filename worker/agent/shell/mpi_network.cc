#include "worker/agent/shell/mpi_network.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>

#include "proto/base/descriptor.h"
#include "proto/base/text.h"

namespace remesh::agent {
namespace {

constexpr std::string_view kMagic = "RMNW";
constexpr std::string_view kTunnel = "wireguard=";

// The bytes of an IPv4 or IPv6 address; empty for another family.
std::string bytes_of(const sockaddr* address) {
  std::string out;
  if (address == nullptr) return out;
  if (address->sa_family == AF_INET) {
    sockaddr_in a{};
    std::memcpy(&a, address, sizeof(a));
    out.assign(reinterpret_cast<const char*>(&a.sin_addr), sizeof(a.sin_addr));
  } else if (address->sa_family == AF_INET6) {
    sockaddr_in6 a{};
    std::memcpy(&a, address, sizeof(a));
    out.assign(reinterpret_cast<const char*>(&a.sin6_addr),
               sizeof(a.sin6_addr));
  }
  return out;
}

// The address of the interface by which packets to `host` leave, as bytes_of()
// has it; "" if none do. flags: of getaddrinfo().
std::string source_address(const std::string& host, const std::string& port,
                           int flags = 0) {
  addrinfo hints{};
  hints.ai_flags = flags;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return "";
  std::string out;
  for (const addrinfo* a = found; a != nullptr && out.empty(); a = a->ai_next) {
    const Descriptor fd(socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage source{};
    auto* const address = reinterpret_cast<sockaddr*>(&source);
    socklen_t size = sizeof(source);
    if (fd.get() >= 0 && connect(fd.get(), a->ai_addr, a->ai_addrlen) == 0 &&
        getsockname(fd.get(), address, &size) == 0)
      out = bytes_of(address);
  }
  freeaddrinfo(found);
  return out;
}

int family_of(const std::string& address) {
  return address.size() == sizeof(in_addr) ? AF_INET : AF_INET6;
}

bool in_network(const std::string& address, const std::string& cidr) {
  const size_t slash = cidr.find('/');
  if (slash == std::string::npos) return false;
  std::string network(address.size(), '\0');
  if (inet_pton(family_of(address), cidr.substr(0, slash).c_str(),
                network.data()) != 1)
    return false;
  const size_t bits = std::min<size_t>(
      std::strtoul(cidr.c_str() + slash + 1, nullptr, 10), address.size() * 8);
  for (size_t b = 0; b < bits; ++b)
    if (((address[b / 8] ^ network[b / 8]) >> (7 - b % 8) & 1) != 0)
      return false;
  return true;
}

// An address of an interface that is up, link-local ones excluded.
struct LocalAddress {
  std::string interface;
  std::string bytes;
  int prefix = 0;
};

std::vector<LocalAddress> local_addresses() {
  std::vector<LocalAddress> out;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return out;
  for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
    LocalAddress a{i->ifa_name, bytes_of(i->ifa_addr), 0};
    if (a.bytes.empty() || (i->ifa_flags & IFF_UP) == 0 ||
        (a.bytes.size() > 4 && in_network(a.bytes, "fe80::/10")))
      continue;
    for (const char c : bytes_of(i->ifa_netmask))
      a.prefix += std::popcount(static_cast<unsigned char>(c));
    out.push_back(std::move(a));
  }
  freeifaddrs(all);
  return out;
}

std::string address_text(const std::string& bytes) {
  char text[INET6_ADDRSTRLEN] = {};
  inet_ntop(family_of(bytes), bytes.data(), text, sizeof(text));
  return text;
}

// Whether packets to `address` stay in the networks of `own` (CIDRs), or a
// route leads there from one of their addresses. Another worker says what the
// address is: no name server is asked for it.
bool reaches(const std::vector<std::string>& own, const std::string& address) {
  const std::string from = source_address(address, "9", AI_NUMERICHOST);
  if (from.empty()) return false;
  std::string bytes(from.size(), '\0');
  inet_pton(family_of(from), address.c_str(), bytes.data());
  return std::any_of(own.begin(), own.end(), [&](const std::string& cidr) {
    return in_network(bytes, cidr) ||
           cidr.substr(0, cidr.find('/')) == address_text(from);
  });
}

bool is_taken(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints,
                  &found) != 0)
    return false;
  const Descriptor fd(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const bool taken = fd.get() >= 0 &&
                     bind(fd.get(), found->ai_addr, found->ai_addrlen) != 0 &&
                     errno == EADDRINUSE;
  freeaddrinfo(found);
  return taken;
}

}  // namespace

Result<PortRange> parse_ports(const std::string& text) {
  PortRange out;
  int end = 0;
  if (std::sscanf(text.c_str(), "%5d-%5d%n", &out.first, &out.last, &end) !=
          2 ||
      static_cast<size_t>(end) != text.size() || out.first < 1024 ||
      out.last < out.first || out.last > 65535)
    return invalid_argument(
        fmt::format("'{}': allowed: FIRST-LAST, ports from 1024 to 65535, for "
                    "example 20000-20999",
                    text));
  return out;
}

MpiNetwork mpi_network(const std::string& interfaces) {
  MpiNetwork out;
  std::vector<LocalAddress> v4, v6;
  std::vector<std::string> names;
  const std::vector<LocalAddress> all = local_addresses();
  std::istringstream in(interfaces);
  for (std::string wanted; std::getline(in, wanted, ',');) {
    // Open MPI knows no CIDRs of IPv6.
    const bool cidr6 = wanted.find(':') != std::string::npos;
    if (!cidr6) names.push_back(wanted);
    for (const LocalAddress& a : all) {
      if (a.interface != wanted && !in_network(a.bytes, wanted)) continue;
      (a.bytes.size() == sizeof(in_addr) ? v4 : v6).push_back(a);
      if (cidr6) names.push_back(a.interface);
    }
  }
  out.interfaces = join(names, ",");
  const std::vector<LocalAddress>& used = v4.empty() ? v6 : v4;
  std::set<std::string> listen;
  for (const LocalAddress& a : used) {
    const std::string text = address_text(a.bytes);
    out.addresses.push_back(fmt::format("{}/{}", text, a.prefix));
    listen.insert(text);
  }
  out.listen = join(std::vector(listen.begin(), listen.end()), ",");
  if (!used.empty()) out.unused_family = v4.empty() ? 4 : 6;
  return out;
}

Status check_listens(const MpiNetwork& network, const std::string& interfaces) {
  if (!network.addresses.empty()) return ok_status();
  return unavailable(
      interfaces.empty()
          ? "no route tells which network leads to the other hosts; give "
            "--interface"
          : "no address of this host that is up is in --interface " +
                interfaces);
}

Status check_ports(const MpiNetwork& network, const PortRange& ports,
                   size_t ranks) {
  if (ports.first == 0 || network.addresses.empty()) return ok_status();
  const std::string& cidr = network.addresses.front();
  size_t free = 0;
  for (int p = ports.first; p <= ports.last && free < ranks; ++p)
    if (!is_taken(cidr.substr(0, cidr.find('/')), p)) ++free;
  if (free == ranks) return ok_status();
  return unavailable(fmt::format(
      "--mpi-ports {}-{}: {} of them are free on this host, and each of its {} "
      "ranks needs one",
      ports.first, ports.last, free, ranks));
}

std::string network_towards(const std::string& address) {
  const size_t start = address.find("://");
  const size_t colon = address.rfind(':');
  if (start == std::string::npos || colon <= start + 3) return "";
  std::string host = address.substr(start + 3, colon - start - 3);
  if (host.starts_with('[') && host.ends_with(']'))
    host = host.substr(1, host.size() - 2);
  std::string own = source_address(host, address.substr(colon + 1));
  if (own.empty()) return "";
  const std::vector<LocalAddress> all = local_addresses();
  const auto interface_of = [&] {
    return std::find_if(all.begin(), all.end(), [&](const LocalAddress& a) {
      return a.bytes == own && a.interface != "lo";
    });
  };
  auto found = interface_of();
  // The way to this host itself says nothing about the way to others.
  for (const char* outside : {"192.0.2.1", "2001:db8::1"}) {  // RFC 5737, 3849
    if (found != all.end()) break;
    const std::string source = source_address(outside, "9");
    if (source.empty()) continue;
    own = source;
    found = interface_of();
  }
  if (found == all.end()) return "";
  if (own.size() > sizeof(in_addr)) return found->interface;
  return fmt::format("{}/{}", address_text(own), found->prefix);
}

std::string with_network(const std::string& blob, const std::string& worker,
                         const MpiNetwork& network) {
  std::string text = worker + " " + join(network.addresses, " ");
  if (!network.tunnel.empty())
    text.append(" ").append(kTunnel).append(network.tunnel);
  return fmt::format("{}{:08x}{:08x}", kMagic, text.size(), blob.size()) +
         text + blob;
}

FenceNetworks split_networks(std::string_view all) {
  constexpr size_t kHead = 20;
  FenceNetworks out;
  while (all.size() >= kHead && all.starts_with(kMagic)) {
    const std::string sizes(all.substr(kMagic.size(), 16));
    const size_t text = std::strtoul(sizes.substr(0, 8).c_str(), nullptr, 16);
    const size_t blob = std::strtoul(sizes.substr(8).c_str(), nullptr, 16);
    all.remove_prefix(kHead);
    std::istringstream in{std::string(all.substr(0, text))};
    std::string worker;
    in >> worker;
    std::string& tunnel = out.tunnels[worker];
    for (std::string a; in >> a;)
      if (a.starts_with(kTunnel))
        tunnel = a.substr(kTunnel.size());
      else
        out.addresses[worker].push_back(a);
    all.remove_prefix(std::min(text, all.size()));
    out.blob += all.substr(0, blob);
    all.remove_prefix(std::min(blob, all.size()));
  }
  out.blob += all;
  return out;
}

std::string why_apart(
    const std::vector<std::string>& own,
    const std::map<std::string, std::vector<std::string>>& others) {
  if (own.empty()) return "";
  for (const auto& [worker, addresses] : others) {
    const bool meets = std::any_of(
        addresses.begin(), addresses.end(), [&own](const std::string& a) {
          return reaches(own, a.substr(0, a.find('/')));
        });
    if (!meets)
      return fmt::format(
          "no route leads from the network of MPI here ({}) to that of worker "
          "{} ({}); give both workers --interface of a network that they share",
          join(own, ", "), worker, join(addresses, ", "));
  }
  return "";
}

}  // namespace remesh::agent
