#include "coordinator/ctl/client.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>

#include "coordinator/rundir/run_dir.h"
#include "proto/base/clock.h"
#include "proto/base/text.h"

namespace remesh::ctl {
namespace {

constexpr int64_t kResendMs = 500;
constexpr int64_t kPollMs = 50;

}  // namespace

Result<Target> find_target(const std::string& named) {
  if (named.starts_with("tcp://")) return Target{.address = named};
  ASSIGN_OR_RETURN(std::string run, rundir::find_run(named));
  Target target{.run_dir = std::move(run)};
  const auto endpoint = rundir::read_endpoint(target.run_dir);
  if (endpoint.ok()) target.address = endpoint.value().address;
  return target;
}

Result<std::unique_ptr<Asker>> Asker::connect(const std::string& address) {
  auto asker = std::make_unique<Asker>();
  ASSIGN_OR_RETURN(asker->client_, wire::Client::connect(address));
  return asker;
}

void Asker::send(pb::Command command) {
  command.set_id(++id_);
  pb::Envelope envelope;
  *envelope.mutable_command() = std::move(command);
  waiting_ = client_->send(envelope);
}

std::optional<pb::Reply> Asker::poll() {
  while (auto envelope = client_->receive()) {
    if (!waiting_ || !envelope->has_reply() || envelope->reply().id() != id_) {
      continue;  // the late answer to an earlier question
    }
    waiting_ = false;
    return std::move(*envelope->mutable_reply());
  }
  return std::nullopt;
}

Result<pb::Reply> ask(const std::string& address, const pb::Command& command,
                      int timeout_ms) {
  ASSIGN_OR_RETURN(const auto client, wire::Client::connect(address));
  pb::Envelope envelope;
  *envelope.mutable_command() = command;
  // One number for all sendings: whichever arrives is answered the same.
  envelope.mutable_command()->set_id(1);
  const int64_t deadline = monotonic_ms() + timeout_ms;
  int64_t send_at = 0;
  for (int64_t now = monotonic_ms(); now < deadline; now = monotonic_ms()) {
    if (now >= send_at) {
      client->send(envelope);
      send_at = now + kResendMs;
    }
    while (auto received = client->receive()) {
      if (received->has_reply() && received->reply().id() == 1) {
        return std::move(*received->mutable_reply());
      }
    }
    pollfd fd{client->fd(), POLLIN, 0};
    ::poll(&fd, 1, static_cast<int>(std::min(kPollMs, deadline - now)));
  }
  return unavailable(fmt::format("no answer from {} within {}", address,
                                 format_duration(timeout_ms / 1000.0)));
}

}  // namespace remesh::ctl
