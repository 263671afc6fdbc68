#include "coordinator/server/listen.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <algorithm>

namespace remesh::server {
namespace {

using wire::HostPort;
using wire::parse_address;

constexpr int kRetryMs = 50;

bool is_ipv6(const std::string& host) {
  in6_addr ignored{};
  return inet_pton(AF_INET6, host.c_str(), &ignored) == 1;
}

std::string make_address(const HostPort& a) {
  return fmt::format("tcp://{}:{}", a.host, a.port);
}

}  // namespace

bool is_loopback(const std::string& bind) {
  if (wire::is_ipc(bind)) return true;
  auto parsed = parse_address(bind);
  return parsed.ok() &&
         (parsed->host.starts_with("127.") || parsed->host == "localhost" ||
          parsed->host == "[::1]" || parsed->host == "lo");
}

Result<std::unique_ptr<wire::Server>> listen(
    const std::string& bind, const std::string& previous,
    const std::optional<wire::ServerKeys>& keys, int patience_ms,
    const std::function<void(int)>& sleep_ms, int dead_after_ms) {
  const int silence_ms = std::max(dead_after_ms, wire::kSilenceMs);
  // Until the address is had, another failure comes, or time is up.
  const auto try_for_long = [&](const std::string& address) {
    for (int waited = 0;; waited += kRetryMs) {
      auto server = wire::Server::bind(address, keys, silence_ms);
      if (server.ok() || server.status().code() != Code::kAlreadyExists ||
          waited >= patience_ms)
        return server;
      sleep_ms(kRetryMs);
    }
  };
  if (wire::is_ipc(bind)) return try_for_long(bind);
  ASSIGN_OR_RETURN(const HostPort wanted, parse_address(bind));
  if (wanted.port != 0) return try_for_long(bind);
  // It comes from a file that may be damaged.
  if (auto again = parse_address(previous); again.ok()) {
    again->host = wanted.host;
    if (auto server = try_for_long(make_address(*again)); server.ok())
      return server;
  }
  return wire::Server::bind(bind, keys, silence_ms);
}

Result<std::string> advertised_address(const std::string& bound,
                                       const std::string& advertise,
                                       const std::string& host) {
  const Result<HostPort> parsed = parse_address(bound);
  if (!parsed.ok()) return bound;
  HostPort out = *parsed;
  if (advertise.empty()) {
    if (out.host == "0.0.0.0" || out.host == "*" || out.host == "[::]")
      out.host = host;
    return make_address(out);
  }
  const std::string given =
      advertise.starts_with("tcp://") ? advertise.substr(6) : advertise;
  const Result<HostPort> with_port = parse_address("tcp://" + given);
  if (with_port.ok()) {
    const int port = with_port.value().port;
    return make_address({with_port.value().host, port > 0 ? port : out.port});
  }
  // The last group of an address may also be a port.
  const size_t colon = given.rfind(':');
  const bool bare =
      is_ipv6(given) && !(is_ipv6(given.substr(0, colon)) &&
                          parse_address("tcp://h" + given.substr(colon)).ok());
  if (!bare && !parse_address("tcp://" + given + ":0").ok())
    return invalid_argument(fmt::format(
        "--advertise {}: must be HOST or HOST:PORT, with an IPv6 address in "
        "brackets: [fd00::1] or [fd00::1]:5710",
        advertise));
  out.host = bare ? "[" + given + "]" : given;
  return make_address(out);
}

Status check_addresses(const std::string& bind, const std::string& advertise) {
  if (wire::is_ipc(bind)) return ok_status();
  RETURN_IF_ERROR(parse_address(bind).status());
  return advertised_address(bind, advertise, "").status();
}

}  // namespace remesh::server
