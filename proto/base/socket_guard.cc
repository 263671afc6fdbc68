#include "proto/base/socket_guard.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace remesh {
namespace {

// Written before g_guarded is set.
bool g_listens_on_some = false;
std::vector<in_addr> g_listen4;
std::vector<in6_addr> g_listen6;
int g_peer_bits = 0;  // of g_peers; 0: all may connect
in6_addr g_peers{};
std::atomic<bool> g_guarded{false};

constexpr char kEstablished[] = "01";

struct End {
  std::string text;  // as in /proc/net/tcp
  bool v6 = false;
  bool loopback = false;
};

End end_of(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    sockaddr_in a{};
    std::memcpy(&a, &address, sizeof(a));
    return {fmt::format("{:08X}:{:04X}", a.sin_addr.s_addr, ntohs(a.sin_port)),
            false, (ntohl(a.sin_addr.s_addr) >> 24) == 127};
  }
  sockaddr_in6 a{};
  std::memcpy(&a, &address, sizeof(a));
  uint32_t words[4] = {};
  std::memcpy(words, &a.sin6_addr, sizeof(words));
  // An IPv4 client of an IPv6 socket.
  if (IN6_IS_ADDR_V4MAPPED(&a.sin6_addr))
    return {fmt::format("{:08X}:{:04X}", words[3], ntohs(a.sin6_port)), false,
            (ntohl(words[3]) >> 24) == 127};
  return {fmt::format("{:08X}{:08X}{:08X}{:08X}:{:04X}", words[0], words[1],
                      words[2], words[3], ntohs(a.sin6_port)),
          true, IN6_IS_ADDR_LOOPBACK(&a.sin6_addr) != 0};
}

bool is_peer(const sockaddr_storage& address) {
  if (g_peer_bits == 0) return true;
  sockaddr_in6 a{};
  std::memcpy(&a, &address, sizeof(a));
  bool equal = a.sin6_family == AF_INET6;
  for (int bit = 0; bit < g_peer_bits; ++bit)
    equal =
        equal && ((a.sin6_addr.s6_addr[bit / 8] ^ g_peers.s6_addr[bit / 8]) >>
                      (7 - bit % 8) &
                  1) == 0;
  return equal;
}

bool equal(const in_addr& a, const in_addr& b) { return a.s_addr == b.s_addr; }
bool equal(const in6_addr& a, const in6_addr& b) {
  return IN6_ARE_ADDR_EQUAL(&a, &b);
}

// Whether `own` is an address to listen on. Where there is one of a family, the
// socket is bound to it.
template <typename Address>
bool is_among(const std::vector<Address>& all, const Address& own) {
  return all.size() < 2 ||
         std::any_of(all.begin(), all.end(),
                     [&](const Address& a) { return equal(a, own); });
}

bool is_listened_on(const sockaddr_storage& own) {
  if (!g_listens_on_some) return true;
  if (own.ss_family == AF_INET)
    return is_among(g_listen4,
                    reinterpret_cast<const sockaddr_in&>(own).sin_addr);
  return is_among(g_listen6,
                  reinterpret_cast<const sockaddr_in6&>(own).sin6_addr);
}

// Whether the connection between these ends is of this user and established;
// nothing if the table does not have it.
std::optional<bool> is_mine(const char* file, const std::string& from,
                            const std::string& to) {
  std::ifstream table(file);
  for (std::string line; std::getline(table, line);) {
    if (line.find(from) == std::string::npos) continue;
    std::istringstream fields(line);
    std::string number, local, remote, state, queues, timer, retransmits;
    unsigned long uid = 0;  // of the owner; 0 if the socket is closed
    if (fields >> number >> local >> remote >> state >> queues >> timer >>
            retransmits >> uid &&
        local == from && remote == to)
      return state == kEstablished && uid == geteuid();
  }
  return std::nullopt;
}

// Whether a connection is to an address that is not listened on, or its other
// end is outside of REMESH_PEERS, or belongs to another user of this host.
bool is_stranger(int fd) {
  sockaddr_storage peer{}, own{};
  socklen_t peer_size = sizeof(peer), own_size = sizeof(own);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) != 0)
    return true;  // the connection has ended
  if (peer.ss_family != AF_INET && peer.ss_family != AF_INET6) return false;
  if (!is_peer(peer) || !is_listened_on(own)) return true;
  const End from = end_of(peer), to = end_of(own);
  constexpr char kTable[] = "/proc/thread-self/net/tcp";
  constexpr char kTable6[] = "/proc/thread-self/net/tcp6";
  auto mine = is_mine(from.v6 ? kTable6 : kTable, from.text, to.text);
  // An IPv6 socket of this host may be connected to an IPv4 address.
  const std::string mapped = "0000000000000000FFFF0000";
  if (!mine && !from.v6)
    mine = is_mine(kTable6, mapped + from.text, mapped + to.text);
  return mine ? !*mine : from.loopback;  // else from another host
}

}  // namespace

void guard_sockets() {
  if (const char* listen = std::getenv(kListenVariable)) {
    g_listens_on_some = true;
    std::istringstream addresses(listen);
    for (std::string address; std::getline(addresses, address, ',');) {
      in_addr v4{};
      in6_addr v6{};
      if (inet_pton(AF_INET, address.c_str(), &v4) == 1)
        g_listen4.push_back(v4);
      else if (inet_pton(AF_INET6, address.c_str(), &v6) == 1)
        g_listen6.push_back(v6);
    }
    if (g_listen4.empty()) g_listen4.push_back({htonl(INADDR_LOOPBACK)});
    if (g_listen6.empty()) g_listen6.push_back(in6addr_loopback);
  }
  if (const char* peers = std::getenv(kPeersVariable)) {
    const std::string cidr = peers;
    const size_t slash = cidr.find('/');
    if (slash != std::string::npos &&
        inet_pton(AF_INET6, cidr.substr(0, slash).c_str(), &g_peers) == 1)
      g_peer_bits = std::clamp(std::atoi(cidr.c_str() + slash + 1), 1, 128);
    else
      g_peer_bits = 128;  // nobody, rather than everybody
  }
  g_guarded = true;
}

}  // namespace remesh

extern "C" int accept(int fd, sockaddr* address, socklen_t* size) {
  const socklen_t room = size == nullptr ? 0 : *size;
  while (true) {
    const int accepted =
        static_cast<int>(syscall(SYS_accept4, fd, address, size, 0));
    if (accepted < 0 || !remesh::g_guarded || !remesh::is_stranger(accepted))
      return accepted;
    close(accepted);
    if (size != nullptr) *size = room;
  }
}

extern "C" int bind(int fd, const sockaddr* address, socklen_t size) noexcept {
  sockaddr_storage to{};
  if (remesh::g_guarded && remesh::g_listens_on_some && size <= sizeof(to)) {
    std::memcpy(&to, address, size);
    auto* v4 = reinterpret_cast<sockaddr_in*>(&to);
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&to);
    if (to.ss_family == AF_INET && v4->sin_addr.s_addr == INADDR_ANY) {
      if (remesh::g_listen4.size() == 1) v4->sin_addr = remesh::g_listen4[0];
    } else if (to.ss_family == AF_INET6 &&
               IN6_IS_ADDR_UNSPECIFIED(&v6->sin6_addr)) {
      if (remesh::g_listen6.size() == 1) v6->sin6_addr = remesh::g_listen6[0];
    }
    address = reinterpret_cast<const sockaddr*>(&to);
  }
  return static_cast<int>(syscall(SYS_bind, fd, address, size));
}
