// Channel: whole protobuf envelopes over ZeroMQ. The only place that knows
// <zmq.hpp>.
//
// Server is a ROUTER that workers and command lines connect to; Client is the
// DEALER at the other end. One frame carries one pb::Envelope behind a fixed
// 8-byte head (magic and wire version); anything else is counted and dropped.
// Delivery is best effort: messages may be lost when a connection breaks, so
// protocols above repeat themselves (control.proto). Frames are limited to
// kMaxFrameBytes.
//
// A connection that is silent for 3 s (ZMTP heartbeats, answered by ZeroMQ's
// own thread) counts as broken; a client connects again by itself, at least
// every 200 ms. Destruction waits up to half a second for what was sent to
// leave.
//
// Threads: a channel belongs to one thread. fd() becomes readable when there
// may be something to receive; each time, drain with receive() until it
// returns nothing (ZeroMQ's own descriptor is edge-triggered). Neither end
// authenticates or encrypts: for trusted networks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::wire {

inline constexpr int64_t kMaxFrameBytes = int64_t{256} << 20;

// Identifies a connection of a Server; changes when the peer reconnects.
using PeerId = std::string;

struct Received {
  PeerId peer;  // empty on a Client
  pb::Envelope envelope;
};

class Server {
 public:
  // `address`: "tcp://127.0.0.1:0" (0: any free port), "tcp://0.0.0.0:5710".
  // A host may be an address or the name of a network interface. Fails naming
  // the address when it is taken.
  static Result<std::unique_ptr<Server>> bind(const std::string& address);
  virtual ~Server() = default;
  // The address bound, with the real port.
  virtual const std::string& address() const = 0;
  virtual int fd() const = 0;
  virtual std::optional<Received> receive() = 0;
  // Never blocks; false when the peer is gone or its queue is full.
  virtual bool send(const PeerId& peer, const pb::Envelope& envelope) = 0;
  // Peers whose TCP connection broke since the last call.
  virtual std::vector<PeerId> take_lost() = 0;
  // Descriptor that is readable when take_lost() may have something.
  virtual int lost_fd() const = 0;
  // Messages that were no envelope. (An oversize frame never gets that far:
  // its connection is closed.)
  virtual uint64_t dropped_frames() const = 0;
};

class Client {
 public:
  // Connects in the background and again whenever the connection breaks; what
  // is sent meanwhile waits in a short queue. Fails on a malformed address
  // only.
  static Result<std::unique_ptr<Client>> connect(const std::string& address);
  virtual ~Client() = default;
  virtual int fd() const = 0;
  virtual std::optional<pb::Envelope> receive() = 0;
  // Never blocks; false when the queue is full (no connection for long).
  virtual bool send(const pb::Envelope& envelope) = 0;
  virtual uint64_t dropped_frames() const = 0;
};

// What is in a frame; for tests and tools.
std::string encode_frame(const pb::Envelope& envelope);
std::optional<pb::Envelope> decode_frame(const void* data, size_t size);

}  // namespace remesh::wire
