#include "proto/wire/channel.h"

#include <linux/pkt_sched.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <zmq.hpp>

#include "proto/base/check.h"
#include "proto/base/number.h"
#include "proto/wire/elements.h"
#include "proto/wire/socket.h"

namespace remesh::wire {
namespace {

// "RMSH", wire version, kind, two zero bytes.
constexpr std::array<char, 8> kHead = {'R', 'M', 'S', 'H', kVersion, 0, 0, 0};
constexpr std::array<char, 8> kNoteHead = {'R',      'M', 'S', 'H',
                                           kVersion, 1,   0,   0};
constexpr size_t kMagicBytes = 4;
constexpr size_t kMaxNoteBytes = 4096;
constexpr int64_t kCurveBytes = 64;  // at most, of encryption: 33 now
constexpr int kHeartbeatMs = 1000;
constexpr int kLingerMs = 500;
// Before the gradients in the queues of a full link: precedence "internetwork
// control", and low delay, which is what Linux goes by (RFC 791, section 3.1).
constexpr int kTos = 0xD0;
constexpr int kPriority = TC_PRIO_INTERACTIVE;
constexpr const char* kAddressForm =
    "allowed: tcp://HOST:PORT, for example tcp://127.0.0.1:5710, or "
    "ipc:///PATH, a socket that only this machine can use";

}  // namespace

std::string bare_head() { return {kHead.data(), kHead.size()}; }

std::optional<int> foreign_version_of(const void* frame, size_t size) {
  if (size < kHead.size() || std::memcmp(frame, kHead.data(), kMagicBytes) != 0)
    return std::nullopt;
  const int version = static_cast<const unsigned char*>(frame)[kMagicBytes];
  if (version == kVersion) return std::nullopt;
  return version;
}

std::string encode_note(const std::string& text) {
  return std::string(kNoteHead.data(), kNoteHead.size()) + text;
}

std::optional<std::string> decode_note(const void* frame, size_t size) {
  if (size < kNoteHead.size() || size > kMaxNoteBytes ||
      std::memcmp(frame, kNoteHead.data(), kNoteHead.size()) != 0)
    return std::nullopt;
  return std::string(static_cast<const char*>(frame) + kNoteHead.size(),
                     size - kNoteHead.size());
}

// Each end judges the silence of the other by itself: no ttl is sent.
void set_common_options(void* socket, const std::string& address,
                        int64_t max_bytes, int silence_ms) {
  zmq::socket_ref s(zmq::from_handle, socket);
  s.set(zmq::sockopt::linger, kLingerMs);
  s.set(zmq::sockopt::rcvhwm, 0);  // inbox.h
  s.set(zmq::sockopt::heartbeat_ivl, kHeartbeatMs);
  s.set(zmq::sockopt::heartbeat_timeout, silence_ms);
  s.set(zmq::sockopt::handshake_ivl, kHandshakeMs);
  s.set(zmq::sockopt::maxmsgsize,
        max_bytes + static_cast<int64_t>(kHead.size()) + kCurveBytes);
  s.set(zmq::sockopt::tos, kTos);
  if (address.find('[') != std::string::npos) s.set(zmq::sockopt::ipv6, true);
}

// An accepted socket has the precedence of the one that listens, but not the
// priority that follows from it.
void prefer(int fd) {
  (void)!setsockopt(fd, SOL_SOCKET, SO_PRIORITY, &kPriority, sizeof(kPriority));
}

bool has_input(void* socket) {
  const zmq::socket_ref s(zmq::from_handle, socket);
  return (s.get(zmq::sockopt::events) & ZMQ_POLLIN) != 0;
}

void skip_parts(void* socket, bool more) {
  zmq::socket_ref s(zmq::from_handle, socket);
  while (more) {
    zmq::message_t part;
    if (!s.recv(part, zmq::recv_flags::dontwait)) return;
    more = part.more();
  }
}

Status address_error(const char* what, const std::string& address, int error,
                     const char* text) {
  if (error == EADDRINUSE)
    return already_exists(std::string(what) + " " + address +
                          ": the address is in use by another process");
  std::string full = std::string(what) + " " + address + ": " + text;
  const bool malformed = error == EINVAL || error == EPROTONOSUPPORT;
  if (malformed || error == ENODEV)
    full += std::string(" (") + kAddressForm + ")";
  // A network interface or its address may come up later.
  return malformed ? invalid_argument(full) : unavailable(full);
}

bool is_ipc(const std::string& address) {
  return address.starts_with("ipc://");
}

Result<HostPort> parse_address(const std::string& address) {
  const std::string bad = "\"" + address + "\" is not an address; ";
  const size_t colon = address.rfind(':');
  // Without a colon, all of it.
  const auto port = parse_number<uint16_t>(address.substr(colon + 1));
  if (!address.starts_with("tcp://") || colon < 7 || !port)
    return invalid_argument(bad + kAddressForm);
  std::string host = address.substr(6, colon - 6);
  if (host.find(':') != std::string::npos &&
      !(host.starts_with('[') && host.ends_with(']')))
    return invalid_argument(bad +
                            "an IPv6 address is written in brackets, for "
                            "example tcp://[fd00::1]:5710");
  return HostPort{std::move(host), *port};
}

Status check_address(const std::string& address) {
  return address.starts_with("ipc:///") ? ok_status()
                                        : parse_address(address).status();
}

Status start_monitor(void* socket, void* monitor, int events) {
  const char* kMonitor = "inproc://monitor";
  if (zmq_socket_monitor(socket, kMonitor, events) != 0)
    return internal(std::string("zeromq: ") + zmq_strerror(zmq_errno()));
  zmq::socket_ref m(zmq::from_handle, monitor);
  m.set(zmq::sockopt::rcvhwm, 0);  // an event must not get lost
  m.connect(kMonitor);
  return ok_status();
}

std::optional<MonitorEvent> next_event(void* monitor) {
  zmq::socket_ref m(zmq::from_handle, monitor);
  while (true) {
    zmq::message_t event, endpoint;
    if (!m.recv(event, zmq::recv_flags::dontwait)) return std::nullopt;
    if (event.more()) (void)m.recv(endpoint, zmq::recv_flags::dontwait);
    if (event.size() < 6) continue;
    uint16_t number = 0;
    int32_t value = 0;
    std::memcpy(&number, event.data(), sizeof(number));
    std::memcpy(&value, static_cast<const char*>(event.data()) + 2,
                sizeof(value));
    return MonitorEvent{number, value};
  }
}

bool fits(const pb::Envelope& envelope, int64_t max_bytes) {
  return envelope.ByteSizeLong() <= static_cast<size_t>(max_bytes);
}

std::string encode_frame(const pb::Envelope& envelope) {
  std::string frame(kHead.data(), kHead.size());
  CHECK_MSG(envelope.AppendToString(&frame), "envelope over 2 GiB");
  return frame;
}

std::optional<pb::Envelope> decode_frame(const void* data, size_t size,
                                         int64_t max_bytes) {
  if (size < kHead.size() ||
      size > kHead.size() + static_cast<size_t>(max_bytes) ||
      std::memcmp(data, kHead.data(), kHead.size()) != 0)
    return std::nullopt;
  const char* body = static_cast<const char*>(data) + kHead.size();
  pb::Envelope e;
  if (!has_few_elements(*pb::Envelope::descriptor(), body, size - kHead.size(),
                        static_cast<int>(max_bytes / kBytesPerElement)) ||
      !e.ParseFromArray(body, static_cast<int>(size - kHead.size())))
    return std::nullopt;
  if (e.body_case() == pb::Envelope::BODY_NOT_SET) return std::nullopt;
  return e;
}

}  // namespace remesh::wire
