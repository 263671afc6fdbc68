// Inbox: frames that have arrived and wait to be read, with a limit for each
// peer; the sources take turns, and the peers of each. Private to this folder.
//
// The queues of libzmq themselves have no limit. Version 4.3.4 aborts the
// program if a connection is reset while its input waits for room in a queue
// that is full, and then a heartbeat is due or is found in what was received
// (stream_engine_base.cpp, out_event).
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "proto/wire/channel.h"

namespace remesh::wire {

// More than a client has in its queue and a connection on the way; and a few
// messages of the largest size.
inline constexpr size_t kMaxWaitingFrames = 512;
inline constexpr size_t kMaxWaitingBytes = 4 * kMaxRequestBytes;

// `Frame` has a size().
template <typename Frame>
class Inbox {
 public:
  // Returns false, and drops the frame, if too much of its peer waits.
  bool add(Received from, Frame frame) {
    Queue& queue = queues_[from.peer];
    const size_t bytes = frame.size();
    const bool is_first = queue.frames.empty();
    if (!is_first && (queue.frames.size() >= kMaxWaitingFrames ||
                      queue.bytes + bytes > kMaxWaitingBytes))
      return false;
    if (is_first) {
      std::deque<PeerId>& peers = peers_of_[from.source];
      if (peers.empty()) turns_.push_back(from.source);
      peers.push_back(from.peer);
    }
    queue.bytes += bytes;
    queue.frames.emplace_back(std::move(from), std::move(frame));
    return true;
  }

  std::optional<std::pair<Received, Frame>> next() {
    if (turns_.empty()) return std::nullopt;
    const auto source = peers_of_.find(turns_.front());
    std::deque<PeerId>& peers = source->second;
    const auto it = queues_.find(peers.front());
    Queue& queue = it->second;
    std::optional out(std::move(queue.frames.front()));
    queue.frames.pop_front();
    queue.bytes -= out->second.size();
    if (queue.frames.empty())
      queues_.erase(it);
    else
      peers.push_back(std::move(peers.front()));
    peers.pop_front();
    if (peers.empty())
      peers_of_.erase(source);
    else
      turns_.push_back(std::move(turns_.front()));
    turns_.pop_front();
    return out;
  }

 private:
  struct Queue {
    std::deque<std::pair<Received, Frame>> frames;
    size_t bytes = 0;
  };
  std::map<PeerId, Queue> queues_;  // those that are not empty
  std::map<std::string, std::deque<PeerId>> peers_of_;  // by source
  std::deque<std::string> turns_;                       // of sources
};

}  // namespace remesh::wire
