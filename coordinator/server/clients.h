// Who has asked the coordinator for something and is not answered yet.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "proto/control.pb.h"
#include "proto/wire/channel.h"

namespace remesh::server {

class Clients {
 public:
  explicit Clients(std::string job) : job_(std::move(job)) {}

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
  // Sends the answer, unless the client has disconnected or is answered.
  void answer(uint64_t token, pb::Reply reply, wire::Server* server);
  // Whether a command is to be answered at the end of the job.
  static bool waits_for_end(const pb::Command& command) {
    return command.kind() == pb::Command::STATUS && command.at_end();
  }
  // Notes that `peer` gets the status at the end of the job, in reply to the
  // newest command that it gave here.
  void await_end(const wire::Server& server, wire::PeerId peer,
                 const pb::Command& command) {
    if (!server.is_connected(peer)) return;  // nobody would forget it
    await_end_[std::move(peer)] = command.id();
  }
  void answer_at_end(pb::JobStatus status, wire::Server* server) const;
  void forget(const wire::PeerId& peer) {
    await_end_.erase(peer);
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
  struct Client {
    wire::PeerId peer;
    uint64_t id = 0;  // of the command
    bool asks_for_change = false;
  };
  void send(const wire::PeerId& peer, uint64_t id, pb::Reply reply,
            wire::Server* server) const;

  std::string job_;
  std::map<uint64_t, Client> clients_;
  std::map<wire::PeerId, uint64_t> await_end_;
  uint64_t newest_ = 0;
};

// To a request that cannot be written now.
pb::Reply not_now(const pb::JobStatus::Problem& problem,
                  const std::string& consequence);

}  // namespace remesh::server
