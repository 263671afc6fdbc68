#include "tests/fuzz/hostile/crowd.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

namespace remesh::testing {
namespace {

// The start of a greeting of ZMTP 3: signature, version, mechanism.
constexpr std::string_view kGreeting{"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE", 17};
constexpr std::string_view kRequest = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";

bool is_established(int fd) {
  sockaddr_in peer{};
  socklen_t size = sizeof(peer);
  return getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0;
}

}  // namespace

Crowd::Crowd(int port, size_t connections) : port_(port), all_(connections) {}

Crowd::~Crowd() {
  for (Connection& c : all_) drop(c);
}

int Crowd::connect_to(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0 ||
      errno == EINPROGRESS)
    return fd;
  close(fd);
  return -1;
}

void Crowd::drop(Connection& c) {
  if (c.fd >= 0) close(c.fd);
  c = {};
}

void Crowd::step() {
  for (size_t i = 0; i < all_.size(); ++i) {
    Connection& c = all_[i];
    char answer[256];
    const ssize_t n =
        c.fd < 0 ? 0 : recv(c.fd, answer, sizeof(answer), MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != ENOTCONN)) {
      drop(c);
      c.fd = connect_to(port_);
    } else if (i % 2 == 0 && c.sent < kGreeting.size() &&
               send(c.fd, &kGreeting[c.sent], 1, MSG_DONTWAIT | MSG_NOSIGNAL) ==
                   1) {
      ++c.sent;
    }
    if (c.fd < 0 || c.established || !is_established(c.fd)) continue;
    c.established = true;
    ++opened_;
  }
  most_ = std::max(most_, open());
}

void Crowd::scan(int ports) {
  constexpr int kPorts = 65'536;
  for (int i = 0; i < ports; ++i, next_port_ = next_port_ % (kPorts - 1) + 1) {
    const int fd = connect_to(next_port_);
    ++scanned_;
    if (fd < 0) continue;
    if (send(fd, kRequest.data(), kRequest.size(),
             MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
      ++answered_;
    close(fd);
  }
}

size_t Crowd::open() const {
  return static_cast<size_t>(
      std::count_if(all_.begin(), all_.end(),
                    [](const Connection& c) { return c.established; }));
}

}  // namespace remesh::testing
