// Channel: protobuf envelopes over ZeroMQ.
//
// Server is a ROUTER that workers and command lines connect to; Client is the
// DEALER at the other end. A frame carries one pb::Envelope after a fixed
// 8-byte header (magic and wire version); anything else is counted and dropped.
// A frame of another wire version is answered with the bare header, so that the
// client learns which version the server has.
// Delivery is best effort: messages may be lost when a connection breaks, so
// the protocol repeats them (control.proto). Frames are limited in size and in
// the number of their elements, and so is what waits in the queues.
//
// A connection that is silent for kSilenceMs, or for what an end was told (ZMTP
// heartbeats, answered by ZeroMQ's own thread), counts as broken. A
// client reconnects by itself, at least every 200 ms. The destructor waits up
// to half a second for pending messages to be sent.
//
// Threads: a channel belongs to one thread. fd() becomes readable when there
// may be something to receive; each time, drain with receive() until it
// returns nothing (ZeroMQ's own descriptor is edge-triggered).
//
// With keys (keys.h) both ends prove who they are and the connection is
// encrypted (CURVE). A server refuses keys that it does not allow during the
// handshake, so that a stranger costs one connection for kHandshakeMs at most,
// and names the key of each message. Without keys there is neither
// authentication nor encryption.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"
#include "proto/wire/keys.h"

namespace remesh::wire {

// Version of the wire format. Increment it when an older program would misread
// a newer message.
inline constexpr int kVersion = 1;
// Limits of a message. A server answers with much: a status, an assignment.
inline constexpr int64_t kMaxRequestBytes = int64_t{4} << 20;
inline constexpr int64_t kMaxAnswerBytes = int64_t{64} << 20;
inline constexpr int64_t kBytesPerElement = 64;  // elements.h; on average
inline constexpr int kSilenceMs = 3000;

// Whether the address is a socket in the file system, "ipc:///PATH".
bool is_ipc(const std::string& address);
struct HostPort {
  std::string host;
  int port = 0;
};
// "tcp://HOST:PORT"; HOST is "*", a name, an IPv4 or a bracketed IPv6 address.
Result<HostPort> parse_address(const std::string& address);

// Identifies a connection of a Server; changes when the peer reconnects.
using PeerId = std::string;

struct Received {
  PeerId peer;
  std::string key;  // public key of the peer; "" without keys
  // The key and the address of the peer's host: who shares them is treated as
  // one sender.
  std::string source;
  pb::Envelope envelope;
};

// Connections of one key from one host that may be open: what waits in them
// takes memory. The others are closed, and what they sent is dropped.
inline constexpr size_t kMaxConnectionsOfSource = 256;
inline constexpr int kHandshakeMs = 2000;
inline constexpr int64_t kSpeakMs = 75'000;  // workers may report each minute
// A client believes that its key is refused after this time.
inline constexpr int64_t kRefusedMs = 2500;

struct ServerKeys {
  KeyPair own;
  // Called by receive() when the holder of `key` presents a ticket. Ok: the
  // key on the ticket is allowed now. Unavailable or Exhausted: not yet, and
  // the client does not count as refused. May be null: no ticket is good.
  std::function<Status(const std::string& key, const Ticket& ticket)> enrol;
  // The clock that tickets are judged by, which clients are told.
  std::function<double()> clock = unix_seconds;
};

struct ClientKeys {
  KeyPair own;
  std::string server;  // public; nobody else is talked to
  // When the server refuses `own`, a ticket asks it to admit that key.
  struct Enrolment {
    KeyPair join;
    std::string worker;
    std::string job;
    friend bool operator==(const Enrolment&, const Enrolment&) = default;
  };
  std::optional<Enrolment> enrolment;
  friend bool operator==(const ClientKeys&, const ClientKeys&) = default;
};

class Server {
 public:
  // `address`: "tcp://127.0.0.1:0" (0: any free port), "tcp://0.0.0.0:5710",
  // "ipc:///PATH". The host is an address or the name of a network interface.
  // Fails, naming the address, if it is in use. `keys`: nullopt for none.
  // Clients that are silent for `silence_ms` are lost.
  static Result<std::unique_ptr<Server>> bind(
      const std::string& address, const std::optional<ServerKeys>& keys,
      int silence_ms = kSilenceMs);
  virtual ~Server() = default;
  // The bound address, with the actual port.
  virtual const std::string& address() const = 0;
  virtual int fd() const = 0;
  virtual std::optional<Received> receive() = 0;
  // Call it after receive() if its caller stops although more may wait.
  virtual void receive_later() = 0;
  // Asked for each message before it is decoded, without its envelope. What it
  // refuses is dropped, and is not in dropped_frames().
  virtual void limit(std::function<bool(const Received&)> admits) = 0;
  // Never blocks; false if the peer is gone, has not taken 64 messages or 16
  // MiB of those before, or the message is too large.
  virtual bool send(const PeerId& peer, const pb::Envelope& envelope) = 0;
  virtual bool is_connected(const PeerId& peer) const = 0;
  // Peers whose TCP connection broke since the last call.
  virtual std::vector<PeerId> take_lost() = 0;
  // A descriptor that is readable when take_lost() may have something.
  virtual int lost_fd() const = 0;
  // Messages that were not envelopes, came while too much of their peer waited,
  // or over a connection too many. (A frame that is too large closes its
  // connection instead.)
  virtual uint64_t dropped_frames() const = 0;
  // The wire version of the last one that had another than ours.
  virtual std::optional<int> foreign_version() const = 0;
  // The source that last had more than kMaxConnectionsOfSource; "" for none.
  virtual const std::string& crowded_source() const = 0;
  // The keys that may connect; none at first. Connections of other keys are
  // closed, and their messages dropped, even those that have arrived.
  virtual void allow(const std::set<std::string>& keys) = 0;
  virtual void admit(const std::string& key) = 0;  // one more
  // Closes connections over which nothing has come since they were accepted so
  // long ago, and those with a message that goes on for very long: a first one
  // less long where more than kMaxConnectionsOfSource of a host have not ended.
  // Call it now and then.
  virtual void close_offenders(int64_t silent_ms = kSpeakMs) = 0;
  // Tells all clients, also those that connect later, the public key that the
  // next server at this address will have.
  virtual void announce(const std::string& next_key) = 0;
};

class Client {
 public:
  // Connects in the background, and again whenever the connection breaks;
  // messages sent meanwhile wait in a short queue. Fails only on a malformed
  // address. `keys`: nullopt for none. `only_ipv6`: has_only_ipv6(address);
  // nullopt to find that out first. A server that is silent for `silence_ms` is
  // lost.
  static Result<std::unique_ptr<Client>> connect(
      const std::string& address, const std::optional<ClientKeys>& keys,
      std::optional<bool> only_ipv6 = std::nullopt,
      int silence_ms = kSilenceMs);
  virtual ~Client() = default;
  virtual int fd() const = 0;
  virtual std::optional<pb::Envelope> receive() = 0;
  // Never blocks; false if the queue is full (no connection for some time) or
  // the message is too large.
  virtual bool send(const pb::Envelope& envelope) = 0;
  // The server's wire version, once it is known to be another one.
  virtual std::optional<int> foreign_version() const = 0;
  // Why the last handshake failed, for people; "" if it did not.
  virtual const std::string& trouble() const = 0;
  // A handshake with its own key has succeeded since it was last changed.
  virtual bool connected() const = 0;
  // The server has been refusing this client for kRefusedMs; trouble() says
  // why. The client keeps trying: its key may be allowed later.
  virtual bool refused() const = 0;
};

// Whether the host has IPv6 addresses only. Waits for a name server, which may
// take a minute if there is none.
bool has_only_ipv6(const std::string& address);

// The contents of a frame; for tests and tools.
std::string encode_frame(const pb::Envelope& envelope);
std::optional<pb::Envelope> decode_frame(const void* data, size_t size,
                                         int64_t max_bytes = kMaxAnswerBytes);

}  // namespace remesh::wire
