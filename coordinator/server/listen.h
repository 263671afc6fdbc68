// The address that the coordinator listens on: the port of its predecessor if
// possible, so that workers find a restarted coordinator at the same address.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "proto/base/status.h"
#include "proto/wire/channel.h"

namespace remesh::server {

// Whether only processes of this machine can connect to it.
bool is_loopback(const std::string& bind);

// Binds `bind`. With port 0 it tries the port of `previous` first (the previous
// bound address of this run, or ""). It retries an address in use for
// `patience_ms`; then it takes any free port if the user gave none, and fails
// otherwise. `sleep_ms` waits. A worker that is silent for `dead_after_ms` is
// declared dead, before which its connection is not closed.
Result<std::unique_ptr<wire::Server>> listen(
    const std::string& bind, const std::string& previous,
    const std::optional<wire::ServerKeys>& keys, int patience_ms,
    const std::function<void(int)>& sleep_ms, int dead_after_ms = 0);

// The address that others connect to. `advertise`: "", HOST or HOST:PORT; an
// IPv6 address needs brackets before a port, and where its last group could be
// one. `host` is the name of this machine, used when `bound` is every interface
// and nothing is advertised.
Result<std::string> advertised_address(const std::string& bound,
                                       const std::string& advertise,
                                       const std::string& host);
// Whether both can be used, before anything is made.
Status check_addresses(const std::string& bind, const std::string& advertise);

}  // namespace remesh::server
