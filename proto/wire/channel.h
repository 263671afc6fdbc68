// Channel: protobuf envelopes over ZeroMQ. The only module that includes
// <zmq.hpp>.
//
// Server is a ROUTER that workers and command lines connect to; Client is the
// DEALER at the other end. A frame carries one pb::Envelope after a fixed
// 8-byte header (magic and wire version); anything else is counted and dropped.
// A frame of another wire version is answered with the bare header, so that the
// client learns which version the server has.
// Delivery is best effort: messages may be lost when a connection breaks, so
// the protocol repeats them (control.proto). Frames are limited to
// kMaxFrameBytes.
//
// A connection that is silent for 3 s (ZMTP heartbeats, answered by ZeroMQ's
// own thread) counts as broken. A client reconnects by itself, at least every
// 200 ms. The destructor waits up to half a second for pending messages to be
// sent.
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

// Of the messages. Raise it when older programs would misunderstand newer ones.
inline constexpr int kVersion = 1;
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
  // The host is an address or the name of a network interface. Fails, naming
  // the address, if it is in use.
  static Result<std::unique_ptr<Server>> bind(const std::string& address);
  virtual ~Server() = default;
  // The bound address, with the actual port.
  virtual const std::string& address() const = 0;
  virtual int fd() const = 0;
  virtual std::optional<Received> receive() = 0;
  // Never blocks; false if the peer is gone or its queue is full.
  virtual bool send(const PeerId& peer, const pb::Envelope& envelope) = 0;
  // Peers whose TCP connection broke since the last call.
  virtual std::vector<PeerId> take_lost() = 0;
  // A descriptor that is readable when take_lost() may have something.
  virtual int lost_fd() const = 0;
  // Messages that were not envelopes. (A frame that is too large closes its
  // connection instead.)
  virtual uint64_t dropped_frames() const = 0;
};

class Client {
 public:
  // Connects in the background, and again whenever the connection breaks;
  // messages sent meanwhile wait in a short queue. Fails only on a malformed
  // address.
  static Result<std::unique_ptr<Client>> connect(const std::string& address);
  virtual ~Client() = default;
  virtual int fd() const = 0;
  virtual std::optional<pb::Envelope> receive() = 0;
  // Never blocks; false if the queue is full (no connection for some time).
  virtual bool send(const pb::Envelope& envelope) = 0;
  // The server's wire version, once it is known to be another one.
  virtual std::optional<int> foreign_version() const = 0;
};

// The contents of a frame; for tests and tools.
std::string encode_frame(const pb::Envelope& envelope);
std::optional<pb::Envelope> decode_frame(const void* data, size_t size);

}  // namespace remesh::wire
