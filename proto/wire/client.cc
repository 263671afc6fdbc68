#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>
#include <zmq.hpp>

#include "proto/base/clock.h"
#include "proto/base/number.h"
#include "proto/wire/channel.h"
#include "proto/wire/readiness.h"
#include "proto/wire/socket.h"

namespace remesh::wire {
namespace {

constexpr int kReconnectMs = 20;
constexpr int kReconnectMaxMs = 160;
// libzmq does not try again after a refusal: this class does.
constexpr int64_t kRetryMs = 500;
// A handshake that fails may be one that was under way before the last change
// of the server's key: the other key is tried if none succeeds for this long.
constexpr int64_t kOtherKeyMs = 300;
// One connection may have ended because the server did.
constexpr int kClosedOnPurpose = 3;

class ClientImpl : public Client {
 public:
  explicit ClientImpl(const std::optional<ClientKeys>& keys)
      : keys_(keys),
        joining_(keys && keys->enrolment),
        context_(1),
        socket_(context_, zmq::socket_type::dealer),
        monitor_(context_, zmq::socket_type::pair) {}

  ~ClientImpl() override {
    zmq_socket_monitor(socket_.handle(), nullptr, 0);
    monitor_.set(zmq::sockopt::linger, 0);
  }

  Status start(const std::string& address, bool only_ipv6, int silence_ms) {
    if (!ready_.ok()) return errno_error("connect to " + address, errno);
    address_ = address;
    if (only_ipv6) socket_.set(zmq::sockopt::ipv6, true);
    set_common_options(socket_.handle(), address, kMaxAnswerBytes, silence_ms);
    socket_.set(zmq::sockopt::sndhwm, kClientQueue);
    socket_.set(zmq::sockopt::reconnect_ivl, kReconnectMs);
    socket_.set(zmq::sockopt::reconnect_ivl_max, kReconnectMaxMs);
    // A host that is down does not answer; do not wait two minutes, as the
    // kernel does, before trying again.
    socket_.set(zmq::sockopt::connect_timeout, 2000);
    RETURN_IF_ERROR(start_monitor(socket_.handle(), monitor_.handle(),
                                  ZMQ_EVENT_HANDSHAKE_SUCCEEDED |
                                      ZMQ_EVENT_HANDSHAKE_FAILED_AUTH |
                                      ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                                      ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL));
    try {
      connect();
    } catch (const zmq::error_t& e) {
      return address_error("connect to", address, e.num(), e.what());
    }
    ready_.add(socket_.get(zmq::sockopt::fd));
    ready_.add(monitor_.get(zmq::sockopt::fd));
    ready_.arm();
    return ok_status();
  }

  int fd() const override { return ready_.fd(); }

  std::optional<pb::Envelope> receive() override {
    ready_.disarm();
    step();
    while (true) {
      zmq::message_t frame;
      if (!socket_.recv(frame, zmq::recv_flags::dontwait)) return std::nullopt;
      if (frame.more())
        skip_parts(socket_.handle(), true);
      else if (auto e = decode_frame(frame.data(), frame.size()))
        return e;
      else if (const auto note = decode_note(frame.data(), frame.size()))
        take_note(*note);
      else if (const auto v = foreign_version_of(frame.data(), frame.size()))
        foreign_version_ = v;
    }
  }

  std::optional<int> foreign_version() const override {
    return foreign_version_;
  }
  const std::string& trouble() const override { return trouble_; }
  bool connected() const override { return connected_; }
  bool refused() const override {
    return refused_since_ms_ >= 0 &&
           monotonic_ms() - refused_since_ms_ >= kRefusedMs;
  }

  bool send(const pb::Envelope& envelope) override {
    step();
    return !joining_ && fits(envelope, kMaxRequestBytes) &&
           send_frame(encode_frame(envelope));
  }

 private:
  bool send_frame(const std::string& frame) {
    const bool sent =
        socket_.send(zmq::buffer(frame), zmq::send_flags::dontwait).has_value();
    if (has_input(socket_.handle())) ready_.arm();
    return sent;
  }

  void connect() {
    if (keys_) {
      const KeyPair& own = joining_ ? keys_->enrolment->join : keys_->own;
      socket_.set(zmq::sockopt::curve_publickey, own.public_key);
      socket_.set(zmq::sockopt::curve_secretkey, own.secret_key);
      socket_.set(zmq::sockopt::curve_serverkey, keys_->server);
    }
    socket_.connect(address_);
    connected_ = false;
    retry_at_ms_ = -1;
    ticket_at_ms_ = 0;
  }

  void reconnect() {
    if (std::exchange(try_other_key_, false)) {
      std::swap(keys_->server, next_server_);
      has_next_ = !has_next_;
    }
    // Without linger: the attempts with the old key would continue while
    // messages wait for them. The connection of a refused key may be gone
    // already.
    const int linger = socket_.get(zmq::sockopt::linger);
    socket_.set(zmq::sockopt::linger, 0);
    (void)zmq_disconnect(socket_.handle(), address_.c_str());
    socket_.set(zmq::sockopt::linger, linger);
    try {
      connect();
    } catch (const zmq::error_t& e) {
      trouble_ = e.what();
      retry_at_ms_ = monotonic_ms() + kRetryMs;
    }
  }

  void step() {
    while (const auto event = next_event(monitor_.handle())) take_event(*event);
    const int64_t now = monotonic_ms();
    if (retry_at_ms_ >= 0 && now >= retry_at_ms_) reconnect();
    if (!joining_ || now < ticket_at_ms_) return;
    ticket_at_ms_ = now + kRetryMs;
    (void)send_frame(encode_note(
        ticket_text({.public_key = keys_->own.public_key,
                     .worker = keys_->enrolment->worker,
                     .job = keys_->enrolment->job,
                     .expires = static_cast<int64_t>(unix_seconds()) +
                                ahead_s_ + kTicketGoodForS})));
  }

  void take_event(const MonitorEvent& event) {
    const int64_t now = monotonic_ms();
    switch (event.number) {
      case ZMQ_EVENT_HANDSHAKE_SUCCEEDED:
        retry_at_ms_ = -1;
        try_other_key_ = false;
        // The coordinator has the new key: the old one may be anybody's.
        if (std::exchange(has_next_, false)) next_server_.clear();
        if (joining_) {
          refused_since_ms_ = -1;
          return;
        }
        connected_ = true;
        closed_ = 0;
        trouble_.clear();
        refused_since_ms_ = -1;
        return;
      case ZMQ_EVENT_HANDSHAKE_FAILED_AUTH: {
        // A restarted coordinator has forgotten whom it admitted; the job
        // secret tells whether it still may.
        const bool may_join_again = keys_->enrolment && !joining_;
        trouble_ = fmt::format(
            "the coordinator does not allow this {}, {}",
            joining_ ? "job secret" : "key",
            (joining_ ? keys_->enrolment->join : keys_->own).public_key);
        if (!may_join_again) note_refusal();
        retry_at_ms_ = now + (may_join_again ? 0 : kRetryMs);
        joining_ = keys_->enrolment.has_value();
        return;
      }
      case ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL:
        trouble_ = keys_ ? "the coordinator runs with --no-auth, this program "
                           "with a key"
                         : "the coordinator demands a key, this program runs "
                           "with --no-auth";
        retry_at_ms_ = now + kRetryMs;
        return;
      default:
        // Only these say that the server closed the connection. One that is
        // frozen is silent for kHandshakeMs.
        if (event.value != EPIPE && event.value != ECONNRESET) return;
        if (!keys_) {
          if (++closed_ >= kClosedOnPurpose && trouble_.empty())
            trouble_ =
                "the coordinator ends connections before they are established, "
                "as one that demands a key does with a program that runs with "
                "--no-auth";
          return;
        }
        trouble_ =
            "the coordinator does not have the expected key, " + keys_->server;
        if (next_server_.empty() || retry_at_ms_ >= 0) return;
        try_other_key_ = true;
        retry_at_ms_ = now + kOtherKeyMs;
    }
  }

  void note_refusal() {
    if (refused_since_ms_ < 0) refused_since_ms_ = monotonic_ms();
  }

  void take_note(const std::string& text) {
    const auto sections = parse_sections(text);
    if (!sections.ok() || sections->size() != 1) return;
    Section note = sections->front();
    if (note["note"] == "next_server" && valid_key(note["public"])) {
      if (keys_ && note["public"] != keys_->server)
        next_server_ = note["public"];
      has_next_ = false;
    } else if (joining_ && note["note"] == "admitted") {
      joining_ = false;
      reconnect();
    } else if (joining_ && note["note"] == "refused") {
      trouble_ = "the coordinator refuses the ticket: " + note["reason"];
      if (note["retry"] == "yes")
        refused_since_ms_ = -1;
      else
        note_refusal();
      take_time(note["time"]);
    }
  }

  // Another clock than the server's does not make the next ticket look expired.
  void take_time(const std::string& text) {
    constexpr int64_t kLatest = int64_t{1} << 53;
    const int64_t time = parse_number<int64_t>(text).value_or(0);
    if (time > 0 && time < kLatest)
      ahead_s_ = time - static_cast<int64_t>(unix_seconds());
  }

  std::optional<ClientKeys> keys_;
  bool joining_;  // presenting a ticket
  std::string next_server_;
  bool try_other_key_ = false;
  bool has_next_ = false;  // keys_->server is the announced key
  bool connected_ = false;
  int closed_ = 0;  // connections by the server, since the last that succeeded
  zmq::context_t context_;
  zmq::socket_t socket_;
  zmq::socket_t monitor_;
  Readiness ready_;
  std::string address_;
  std::optional<int> foreign_version_;
  std::string trouble_;
  int64_t refused_since_ms_ = -1;
  int64_t retry_at_ms_ = -1;
  int64_t ticket_at_ms_ = 0;
  int64_t ahead_s_ = 0;  // the server's clock, if it refused a ticket
};

}  // namespace

// ZeroMQ would prefer an IPv6 address to an IPv4 address of the same name, such
// as localhost, on which a server listens.
bool has_only_ipv6(const std::string& address) {
  if (!address.starts_with("tcp://")) return false;
  const std::string host = address.substr(6, address.rfind(':') - 6);
  const auto resolves = [&host](int family) {
    addrinfo hints{};
    hints.ai_family = family;
    addrinfo* found = nullptr;
    if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return false;
    freeaddrinfo(found);
    return true;
  };
  return !resolves(AF_INET) && resolves(AF_INET6);
}

Result<std::unique_ptr<Client>> Client::connect(
    const std::string& address, const std::optional<ClientKeys>& keys,
    std::optional<bool> only_ipv6, int silence_ms) {
  RETURN_IF_ERROR(check_address(address));
  try {
    auto client = std::make_unique<ClientImpl>(keys);
    RETURN_IF_ERROR(client->start(
        address, only_ipv6 ? *only_ipv6 : has_only_ipv6(address), silence_ms));
    return std::unique_ptr<Client>(std::move(client));
  } catch (const zmq::error_t& e) {
    return internal("zeromq, " + address + ": " + e.what());
  }
}

}  // namespace remesh::wire
