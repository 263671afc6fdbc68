// Where the coordinator listens: the port of the life before, when it can be
// had, so that workers find a restarted coordinator where it was.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "proto/base/status.h"
#include "proto/wire/channel.h"

namespace remesh::server {

struct HostPort {
  std::string host;
  int port = 0;
};
// "tcp://HOST:PORT", HOST may be "*", a name, an IPv4 or a bracketed IPv6.
Result<HostPort> parse_address(const std::string& address);
std::string make_address(const HostPort& address);

// Binds `bind`. With port 0 the port of `previous` (the address this run was
// bound to before, or "") is tried first. An address that is taken is tried
// again for `patience_ms`; then a free port is taken if the port was not the
// user's wish, else the failure is returned. `sleep_ms` waits.
Result<std::unique_ptr<wire::Server>> listen(
    const std::string& bind, const std::string& previous, int patience_ms,
    const std::function<void(int)>& sleep_ms);

// The address that others connect to, from the one bound. `advertise`: "",
// HOST, or HOST:PORT. `host` is this machine's name, used when bound to every
// interface and nothing is advertised.
std::string advertised_address(const std::string& bound,
                               const std::string& advertise,
                               const std::string& host);

}  // namespace remesh::server
