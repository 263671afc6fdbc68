#include "proto/wire/channel.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <string_view>
#include <zmq.hpp>

#include "proto/base/check.h"

namespace remesh::wire {
namespace {

// "RMSH", wire version, three zero bytes.
constexpr std::array<char, 8> kHead = {'R', 'M', 'S', 'H', kVersion, 0, 0, 0};
constexpr size_t kMagicBytes = 4;
constexpr int kHeartbeatMs = 1000;
constexpr int kSilenceMs = 3000;
constexpr int kLingerMs = 500;
// Small: messages that wait for an absent coordinator are stale on arrival.
constexpr int kClientQueue = 128;
constexpr int kServerQueue = 1000;  // per peer
constexpr int kReconnectMs = 20;
constexpr int kReconnectMaxMs = 160;
constexpr size_t kRememberedLost = 4096;
constexpr const char* kAddressForm =
    "allowed: tcp://HOST:PORT, for example tcp://127.0.0.1:5710";

// A descriptor that is readable while another one is, or while it is armed.
// ZeroMQ's descriptor becomes unreadable once any call, including a send, has
// processed the socket's events; arming preserves that there is input.
class Readiness {
 public:
  Readiness() {
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (ok()) add(event_);
  }
  ~Readiness() {
    if (epoll_ >= 0) close(epoll_);
    if (event_ >= 0) close(event_);
  }
  Readiness(const Readiness&) = delete;
  Readiness& operator=(const Readiness&) = delete;
  bool ok() const { return epoll_ >= 0 && event_ >= 0; }
  void add(int fd) {
    epoll_event e{};
    e.events = EPOLLIN;
    CHECK(epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &e) == 0);
  }
  void arm() {
    if (armed_) return;
    armed_ = true;
    const uint64_t one = 1;
    CHECK(write(event_, &one, sizeof(one)) == sizeof(one));
  }
  void disarm() {
    if (!armed_) return;
    armed_ = false;
    uint64_t n = 0;
    CHECK(read(event_, &n, sizeof(n)) == sizeof(n));
  }
  int fd() const { return epoll_; }

 private:
  int epoll_ = -1;
  int event_ = -1;
  bool armed_ = false;
};

void set_common_options(zmq::socket_t& s, const std::string& address) {
  s.set(zmq::sockopt::linger, kLingerMs);
  s.set(zmq::sockopt::heartbeat_ivl, kHeartbeatMs);
  s.set(zmq::sockopt::heartbeat_timeout, kSilenceMs);
  s.set(zmq::sockopt::heartbeat_ttl, kSilenceMs);
  s.set(zmq::sockopt::handshake_ivl, kSilenceMs);
  s.set(zmq::sockopt::maxmsgsize,
        kMaxFrameBytes + static_cast<int64_t>(kHead.size()));
  if (address.find('[') != std::string::npos) s.set(zmq::sockopt::ipv6, true);
}

// Skips the rest of a message with more parts than ours have.
void skip_parts(zmq::socket_t& s, bool more) {
  while (more) {
    zmq::message_t part;
    if (!s.recv(part, zmq::recv_flags::dontwait)) return;
    more = part.more();
  }
}

// The version of a frame that has another one than ours.
std::optional<int> foreign_version_of(const zmq::message_t& frame) {
  if (frame.size() < kHead.size() ||
      std::memcmp(frame.data(), kHead.data(), kMagicBytes) != 0)
    return std::nullopt;
  const int version =
      static_cast<const unsigned char*>(frame.data())[kMagicBytes];
  if (version == kVersion) return std::nullopt;
  return version;
}

bool has_input(zmq::socket_t& s) {
  return (s.get(zmq::sockopt::events) & ZMQ_POLLIN) != 0;
}

Status address_error(const char* what, const std::string& address,
                     const zmq::error_t& e) {
  if (e.num() == EADDRINUSE)
    return already_exists(std::string(what) + " " + address +
                          ": the address is in use by another process");
  const std::string text = std::string(what) + " " + address + ": " + e.what();
  if (e.num() == EINVAL || e.num() == EPROTONOSUPPORT || e.num() == ENODEV)
    return invalid_argument(text + " (" + kAddressForm + ")");
  return unavailable(text);
}

class ServerImpl : public Server {
 public:
  ServerImpl()
      : context_(1),
        socket_(context_, zmq::socket_type::router),
        monitor_(context_, zmq::socket_type::pair) {}

  ~ServerImpl() override {
    zmq_socket_monitor(socket_.handle(), nullptr, 0);
    monitor_.set(zmq::sockopt::linger, 0);
  }

  Status start(const std::string& address) {
    if (!ready_.ok() || !lost_ready_.ok())
      return errno_error("listen on " + address, errno);
    set_common_options(socket_, address);
    socket_.set(zmq::sockopt::sndhwm, kServerQueue);
    socket_.set(zmq::sockopt::rcvhwm, kServerQueue);
    socket_.set(zmq::sockopt::router_mandatory, true);
    socket_.set(zmq::sockopt::backlog, 1024);
    const char* kMonitor = "inproc://monitor";
    if (zmq_socket_monitor(socket_.handle(), kMonitor,
                           ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_DISCONNECTED) != 0)
      return internal("listen on " + address + ": " +
                      zmq_strerror(zmq_errno()));
    monitor_.set(zmq::sockopt::rcvhwm, 0);  // an event must not get lost
    monitor_.connect(kMonitor);
    try {
      socket_.bind(address);
    } catch (const zmq::error_t& e) {
      return address_error("listen on", address, e);
    }
    address_ = socket_.get(zmq::sockopt::last_endpoint);
    ready_.add(socket_.get(zmq::sockopt::fd));
    lost_ready_.add(monitor_.get(zmq::sockopt::fd));
    ready_.arm();
    lost_ready_.arm();
    return ok_status();
  }

  const std::string& address() const override { return address_; }
  int fd() const override { return ready_.fd(); }
  int lost_fd() const override { return lost_ready_.fd(); }
  uint64_t dropped_frames() const override { return dropped_; }

  std::optional<Received> receive() override {
    ready_.disarm();
    while (true) {
      zmq::message_t id;
      if (!socket_.recv(id, zmq::recv_flags::dontwait)) return std::nullopt;
      zmq::message_t frame;
      bool more = id.more();
      if (more && socket_.recv(frame, zmq::recv_flags::dontwait))
        more = frame.more();
      Received out;
      out.peer.assign(static_cast<const char*>(id.data()), id.size());
      note_connection(out.peer, frame);
      if (more) {
        skip_parts(socket_, more);
      } else if (auto e = decode_frame(frame.data(), frame.size())) {
        out.envelope = std::move(*e);
        return out;
      } else if (foreign_version_of(frame)) {
        (void)send_frame(out.peer, {kHead.data(), kHead.size()});
      }
      ++dropped_;
    }
  }

  bool send(const PeerId& peer, const pb::Envelope& envelope) override {
    return send_frame(peer, encode_frame(envelope));
  }

  std::vector<PeerId> take_lost() override {
    lost_ready_.disarm();
    read_monitor();
    return std::exchange(lost_, {});
  }

 private:
  bool send_frame(const PeerId& peer, const std::string& frame) {
    bool sent = false;
    try {
      sent = socket_.send(zmq::buffer(peer), zmq::send_flags::sndmore |
                                                 zmq::send_flags::dontwait) &&
             socket_.send(zmq::buffer(frame), zmq::send_flags::dontwait);
    } catch (const zmq::error_t& e) {
      CHECK_MSG(e.num() == EHOSTUNREACH, e.what());
    }
    if (has_input(socket_)) ready_.arm();
    return sent;
  }

  // The monitor reports descriptors, messages name peers. A frame carries the
  // descriptor that it came from, which relates the two.
  void note_connection(const PeerId& peer, zmq::message_t& frame) {
    if (peers_.count(peer) > 0 || gone_.count(peer) > 0) return;
    const int fd = zmq_msg_get(frame.handle(), ZMQ_SRCFD);
    if (fd < 0) return;
    // Descriptor numbers are reused: first process the end of the connection
    // that had this one before.
    read_monitor();
    if (auto old = by_fd_.find(fd); old != by_fd_.end()) lose(old->second);
    by_fd_[fd] = peer;
    peers_[peer] = fd;
    if (open_fds_.count(fd) == 0) lose(PeerId(peer));  // has ended since
    if (!lost_.empty()) lost_ready_.arm();
  }

  // By value: erasing may destroy the caller's copy.
  void lose(PeerId peer) {
    auto it = peers_.find(peer);
    if (it == peers_.end()) return;
    by_fd_.erase(it->second);
    peers_.erase(it);
    lost_.push_back(peer);
    // Messages of a lost peer may still be in the queue.
    if (gone_.insert(peer).second) gone_order_.push_back(std::move(peer));
    if (gone_order_.size() > kRememberedLost) {
      gone_.erase(gone_order_.front());
      gone_order_.pop_front();
    }
  }

  void read_monitor() {
    while (true) {
      zmq::message_t event, endpoint;
      if (!monitor_.recv(event, zmq::recv_flags::dontwait)) return;
      if (event.more()) {
        (void)monitor_.recv(endpoint, zmq::recv_flags::dontwait);
      }
      if (event.size() < 6) continue;
      uint16_t number = 0;
      int32_t fd = 0;
      std::memcpy(&number, event.data(), sizeof(number));
      std::memcpy(&fd, static_cast<const char*>(event.data()) + 2, sizeof(fd));
      if (number == ZMQ_EVENT_ACCEPTED) {
        open_fds_.insert(fd);
      } else if (number == ZMQ_EVENT_DISCONNECTED) {
        open_fds_.erase(fd);
        if (auto it = by_fd_.find(fd); it != by_fd_.end()) lose(it->second);
      }
    }
  }

  zmq::context_t context_;
  zmq::socket_t socket_;
  zmq::socket_t monitor_;
  Readiness ready_;
  Readiness lost_ready_;
  std::string address_;
  uint64_t dropped_ = 0;
  std::set<int> open_fds_;
  std::map<int, PeerId> by_fd_;
  std::map<PeerId, int> peers_;
  std::set<PeerId> gone_;
  std::deque<PeerId> gone_order_;
  std::vector<PeerId> lost_;
};

class ClientImpl : public Client {
 public:
  ClientImpl() : context_(1), socket_(context_, zmq::socket_type::dealer) {}

  Status start(const std::string& address) {
    if (!ready_.ok()) return errno_error("connect to " + address, errno);
    set_common_options(socket_, address);
    socket_.set(zmq::sockopt::sndhwm, kClientQueue);
    socket_.set(zmq::sockopt::rcvhwm, kServerQueue);
    socket_.set(zmq::sockopt::reconnect_ivl, kReconnectMs);
    socket_.set(zmq::sockopt::reconnect_ivl_max, kReconnectMaxMs);
    // A host that is down does not answer; do not wait two minutes, as the
    // kernel does, before trying again.
    socket_.set(zmq::sockopt::connect_timeout, 2000);
    try {
      socket_.connect(address);
    } catch (const zmq::error_t& e) {
      return address_error("connect to", address, e);
    }
    ready_.add(socket_.get(zmq::sockopt::fd));
    ready_.arm();
    return ok_status();
  }

  int fd() const override { return ready_.fd(); }

  std::optional<pb::Envelope> receive() override {
    ready_.disarm();
    while (true) {
      zmq::message_t frame;
      if (!socket_.recv(frame, zmq::recv_flags::dontwait)) return std::nullopt;
      if (frame.more())
        skip_parts(socket_, true);
      else if (auto e = decode_frame(frame.data(), frame.size()))
        return e;
      else if (const auto version = foreign_version_of(frame))
        foreign_version_ = version;
    }
  }

  std::optional<int> foreign_version() const override {
    return foreign_version_;
  }

  bool send(const pb::Envelope& envelope) override {
    const std::string frame = encode_frame(envelope);
    const bool sent =
        socket_.send(zmq::buffer(frame), zmq::send_flags::dontwait).has_value();
    if (has_input(socket_)) ready_.arm();
    return sent;
  }

 private:
  zmq::context_t context_;
  zmq::socket_t socket_;
  Readiness ready_;
  std::optional<int> foreign_version_;
};

Status check_address(const std::string& address) {
  Status bad = invalid_argument("address '" + address + "': " + kAddressForm);
  if (address.rfind("ipc://", 0) == 0) return ok_status();
  const size_t colon = address.rfind(':');
  if (address.rfind("tcp://", 0) != 0 || colon < 7) return bad;
  const std::string port = address.substr(colon + 1);
  if (port.empty() || port.size() > 5 ||
      port.find_first_not_of("0123456789") != std::string::npos ||
      std::stoi(port) > 65535)
    return bad;
  return ok_status();
}

template <typename Base, typename Impl>
Result<std::unique_ptr<Base>> make(const std::string& address) {
  RETURN_IF_ERROR(check_address(address));
  try {
    auto impl = std::make_unique<Impl>();
    RETURN_IF_ERROR(impl->start(address));
    return std::unique_ptr<Base>(std::move(impl));
  } catch (const zmq::error_t& e) {
    return internal("zeromq, " + address + ": " + e.what());
  }
}

}  // namespace

std::string encode_frame(const pb::Envelope& envelope) {
  std::string frame(kHead.data(), kHead.size());
  CHECK_MSG(envelope.AppendToString(&frame), "envelope over 2 GiB");
  return frame;
}

std::optional<pb::Envelope> decode_frame(const void* data, size_t size) {
  if (size < kHead.size() ||
      size > kHead.size() + static_cast<size_t>(kMaxFrameBytes) ||
      std::memcmp(data, kHead.data(), kHead.size()) != 0)
    return std::nullopt;
  pb::Envelope e;
  if (!e.ParseFromArray(static_cast<const char*>(data) + kHead.size(),
                        static_cast<int>(size - kHead.size())))
    return std::nullopt;
  if (e.body_case() == pb::Envelope::BODY_NOT_SET) return std::nullopt;
  return e;
}

Result<std::unique_ptr<Server>> Server::bind(const std::string& address) {
  return make<Server, ServerImpl>(address);
}

Result<std::unique_ptr<Client>> Client::connect(const std::string& address) {
  return make<Client, ClientImpl>(address);
}

}  // namespace remesh::wire
