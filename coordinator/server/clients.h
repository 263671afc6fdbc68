// Who has asked the coordinator for something and is not answered yet.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "proto/control.pb.h"
#include "proto/wire/channel.h"

namespace remesh::server {

class Clients {
 public:
  struct Client {
    wire::PeerId peer;
    uint64_t id = 0;  // of the command
    bool asks_for_change = false;
  };

  // Returns the number by which the answer finds the client.
  uint64_t add(wire::PeerId peer, const pb::Command& command) {
    clients_[++newest_] = {std::move(peer), command.id(),
                           command.kind() != pb::Command::STATUS};
    return newest_;
  }
  // The answer waits until what was asked is written.
  bool asks_for_change(uint64_t token) const {
    const auto it = clients_.find(token);
    return it != clients_.end() && it->second.asks_for_change;
  }
  // Nothing: it has disconnected, or is answered.
  std::optional<Client> take(uint64_t token) {
    const auto node = clients_.extract(token);
    if (node.empty()) return std::nullopt;
    return node.mapped();
  }
  void forget(const wire::PeerId& peer) {
    std::erase_if(clients_,
                  [&](const auto& c) { return c.second.peer == peer; });
  }
  std::vector<uint64_t> wait_for_a_write() const {
    std::vector<uint64_t> out;
    for (const auto& [token, client] : clients_)
      if (client.asks_for_change) out.push_back(token);
    return out;
  }

 private:
  std::map<uint64_t, Client> clients_;
  uint64_t newest_ = 0;
};

// To a request that cannot be written now.
pb::Reply not_now(const pb::JobStatus::Problem& problem,
                  const std::string& consequence);

}  // namespace remesh::server
