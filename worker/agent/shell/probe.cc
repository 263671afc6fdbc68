#include "worker/agent/shell/probe.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "proto/base/descriptor.h"
#include "proto/wire/channel.h"

namespace remesh::agent {
namespace {

constexpr int kConnectMs = 3000;
constexpr int kGreetingMs = 2000;

bool ready(int fd, int16_t events, int ms) {
  pollfd p{fd, events, 0};
  return poll(&p, 1, ms) > 0;
}

// 0 or errno.
int connect_to(int fd, const addrinfo& to) {
  if (connect(fd, to.ai_addr, to.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  if (!ready(fd, POLLOUT, kConnectMs)) return ETIMEDOUT;
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

// Whether the peer sends the signature of ZMTP, which every ZeroMQ socket does
// first: 0xff, 8 bytes, 0x7f.
bool greets_in_zmtp(int fd) {
  std::array<unsigned char, 10> greeting{};
  size_t got = 0;
  while (got < greeting.size() && ready(fd, POLLIN, kGreetingMs)) {
    const ssize_t n = recv(fd, &greeting[got], greeting.size() - got, 0);
    if (n <= 0) return false;
    got += static_cast<size_t>(n);
  }
  return got == greeting.size() && greeting[0] == 0xff && greeting[9] == 0x7f;
}

}  // namespace

std::string why_refused(const std::string& address, const pb::Refusal& refusal,
                        const std::string& job) {
  const std::string advice = fmt::format(
      "; connect to the coordinator of \"{}\", or leave --job out", job);
  return fmt::format("the coordinator at {} refuses this worker: {}{}", address,
                     refusal.reason(),
                     refusal.kind() == pb::Refusal::OTHER_JOB ? advice : "");
}

std::string why_no_answer(const std::string& address) {
  const std::string place = address.substr(address.find("://") + 3);
  if (wire::is_ipc(address))
    return fmt::format("nobody answers on the socket {} of this machine",
                       place);
  const size_t colon = place.rfind(':');
  std::string host = place.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']'))
    host = host.substr(1, host.size() - 2);
  const std::string port = place.substr(colon + 1);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int e = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
      e != 0)
    return fmt::format("the host name {} cannot be resolved: {}", host,
                       gai_strerror(e));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found,
                                                             freeaddrinfo);
  int error = EHOSTUNREACH;
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    const Descriptor socket(
        ::socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (socket.get() < 0) continue;
    error = connect_to(socket.get(), *a);
    if (error != 0) continue;
    return greets_in_zmtp(socket.get())
               ? "the coordinator accepts connections but does not answer"
               : fmt::format(
                     "port {} of {} belongs to another program, not to "
                     "a coordinator",
                     port, host);
  }
  if (error == ECONNREFUSED)
    return fmt::format("nothing listens on port {} of {}", port, host);
  return fmt::format("{} cannot be reached: {}", place, std::strerror(error));
}

}  // namespace remesh::agent
