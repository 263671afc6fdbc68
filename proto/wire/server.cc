#include <linux/tcp.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <zmq.hpp>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/wire/channel.h"
#include "proto/wire/inbox.h"
#include "proto/wire/readiness.h"
#include "proto/wire/socket.h"
#include "proto/wire/zap.h"

namespace remesh::wire {
namespace {

constexpr size_t kRememberedLost = 4096;
// Fails closed: without the thread that decides on keys nobody connects.
// libzmq 4.3.4 has the option, but zmq.h names it only for drafts.
constexpr int kZapEnforceDomain = 93;
// Descriptors that remain for the files of the program.
constexpr size_t kOwnDescriptors = 200;
constexpr size_t kMaxConnections = 20'000;
constexpr int64_t kBadMs = 1;  // in which receive() drops frames in one call
// Frames that it takes from libzmq in one call.
constexpr int kMostCollected = 10'000;
// Of a message that is not complete: libzmq shows its parts only with the last.
constexpr uint64_t kMostUndelivered = 2 * kMaxWaitingBytes;
// The same of each first message, where many of a host are under way.
constexpr uint64_t kMostOfMany = 64 << 10;
constexpr int64_t kLookMs = 1000;

size_t connection_limit() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return kMaxConnections;
  const size_t most = std::min<size_t>(files.rlim_cur, 1 << 30);
  return std::min(kMaxConnections, most > 2 * kOwnDescriptors
                                       ? most - kOwnDescriptors
                                       : most / 2);
}

// At the other end of the connection; "" if it is none of a network.
std::string host_of(int fd) {
  sockaddr_storage at{};
  socklen_t size = sizeof(at);
  auto* address = reinterpret_cast<sockaddr*>(&at);
  std::array<char, NI_MAXHOST> host{};
  if (getpeername(fd, address, &size) != 0 || at.ss_family == AF_UNIX ||
      getnameinfo(address, size, host.data(), host.size(), nullptr, 0,
                  NI_NUMERICHOST) != 0)
    return "";
  return host.data();
}

// What TCP has counted; zeros for another kind of connection.
tcp_info counts_of(int fd) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 ? info
                                                                  : tcp_info{};
}

// libzmq removes whatever has the path of an IPC address. Only a socket that
// nobody listens on is left to it.
Status check_free(const std::string& address) {
  if (!is_ipc(address)) return ok_status();
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  const std::string path = address.substr(address.find("://") + 3);
  struct stat found {};
  if (lstat(path.c_str(), &found) != 0) return ok_status();
  if (!S_ISSOCK(found.st_mode))
    return invalid_argument("listen on " + address +
                            ": a file that is not a socket has this path");
  if (path.size() >= sizeof(to.sun_path)) return ok_status();  // bind() fails
  path.copy(to.sun_path, path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool used =
      fd >= 0 && connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0;
  if (fd >= 0) close(fd);
  return used ? address_error("listen on", address, EADDRINUSE, "")
              : ok_status();
}

class ServerImpl : public Server {
 public:
  explicit ServerImpl(const std::optional<ServerKeys>& keys)
      : context_(1),
        zap_(keys ? std::make_unique<Zap>(context_.handle()) : nullptr),
        socket_(context_, zmq::socket_type::router),
        monitor_(context_, zmq::socket_type::pair),
        max_connections_(connection_limit()) {
    if (keys) keys_ = *keys;
  }

  ~ServerImpl() override {
    zmq_socket_monitor(socket_.handle(), nullptr, 0);
    monitor_.set(zmq::sockopt::linger, 0);
  }

  Status start(const std::string& address, int silence_ms) {
    if (!ready_.ok() || !lost_ready_.ok())
      return errno_error("listen on " + address, errno);
    set_common_options(socket_.handle(), address, kMaxRequestBytes, silence_ms);
    socket_.set(zmq::sockopt::sndhwm, kServerQueue);
    socket_.set(zmq::sockopt::router_mandatory, true);
    socket_.set(zmq::sockopt::backlog, 1024);
    if (zap_) {
      socket_.set(zmq::sockopt::curve_server, true);
      socket_.set(zmq::sockopt::curve_secretkey, keys_.own.secret_key);
      socket_.set(zmq::sockopt::zap_domain, kZapDomain);
      const int on = 1;
      CHECK(zmq_setsockopt(socket_.handle(), kZapEnforceDomain, &on,
                           sizeof(on)) == 0);
    }
    RETURN_IF_ERROR(start_monitor(socket_.handle(), monitor_.handle(),
                                  ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_DISCONNECTED));
    try {
      socket_.bind(address);
    } catch (const zmq::error_t& e) {
      return address_error("listen on", address, e.num(), e.what());
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
  std::optional<int> foreign_version() const override {
    return foreign_version_;
  }
  const std::string& crowded_source() const override { return crowded_source_; }

  std::optional<Received> receive() override {
    ready_.disarm();
    collect();
    if (!lost_.empty()) lost_ready_.arm();
    const int64_t end_ms = monotonic_ms() + kBadMs;
    do {
      auto next = inbox_.next();
      if (!next) return std::nullopt;
      auto& [out, frame] = *next;
      if (admits_ && !admits_(out)) continue;
      if (zap_ && !zap_->allows(out.key)) {
        // Its key was allowed when it connected.
        if (const auto p = peers_.find(out.peer); p != peers_.end())
          shutdown(p->second.fd, SHUT_RDWR);
      } else if (auto e = decode_frame(frame.data(), frame.size(),
                                       kMaxRequestBytes)) {
        out.envelope = std::move(*e);
        return std::move(out);
      } else if (const auto note = decode_note(frame.data(), frame.size())) {
        take_ticket(out, *note);
        continue;
      } else if (const auto version =
                     foreign_version_of(frame.data(), frame.size())) {
        foreign_version_ = version;
        (void)send_frame(out.peer, bare_head());
      }
      ++dropped_;
    } while (monotonic_ms() < end_ms);
    receive_later();
    return std::nullopt;
  }

  void receive_later() override { ready_.arm(); }
  void limit(std::function<bool(const Received&)> admits) override {
    admits_ = std::move(admits);
  }

  bool send(const PeerId& peer, const pb::Envelope& envelope) override {
    return fits(envelope, kMaxAnswerBytes) &&
           send_frame(peer, encode_frame(envelope));
  }

  void allow(const std::set<std::string>& keys) override {
    if (!zap_) return;
    zap_->allow(keys);
    read_monitor();
    // libzmq cannot close one connection. It does when the connection ends.
    for (const auto& [peer, p] : peers_)
      if (keys.count(p.key) == 0) shutdown(p.fd, SHUT_RDWR);
  }

  void admit(const std::string& key) override {
    if (zap_) zap_->admit(key);
  }

  void close_offenders(int64_t silent_ms) override {
    const int64_t now = monotonic_ms();
    if (now - looked_ms_ < kLookMs) return;
    looked_ms_ = now;
    read_monitor();
    for (auto& [fd, open] : open_) {
      const uint64_t received = counts_of(fd).tcpi_bytes_received;
      // Nothing that came before a whole message is part of one without an end.
      if (std::exchange(open.delivered, false)) open.delivered_bytes = received;
      if ((now - open.accepted_ms > silent_ms && !by_fd_.contains(fd)) ||
          received > open.delivered_bytes + kMostUndelivered ||
          (is_one_of_many(open) && received > kMostOfMany))
        shutdown(fd, SHUT_RDWR);
    }
  }

  void announce(const std::string& next_key) override {
    news_ = section_text({{"note", "next_server"}, {"public", next_key}});
    for (const auto& [peer, p] : peers_)
      (void)send_frame(peer, encode_note(news_));
  }

  bool is_connected(const PeerId& peer) const override {
    return peers_.contains(peer);
  }
  std::vector<PeerId> take_lost() override {
    lost_ready_.disarm();
    read_monitor();
    return std::exchange(lost_, {});
  }

 private:
  // Takes what has arrived from libzmq, whose queues have no limit.
  void collect() {
    for (int n = 0; n < kMostCollected; ++n) {
      zmq::message_t id;
      if (!socket_.recv(id, zmq::recv_flags::dontwait)) return;
      zmq::message_t frame;
      bool more = id.more();
      if (more && socket_.recv(frame, zmq::recv_flags::dontwait))
        more = frame.more();
      Received from;
      from.peer.assign(static_cast<const char*>(id.data()), id.size());
      const char* key =
          zap_ ? zmq_msg_gets(frame.handle(), "User-Id") : nullptr;
      if (key != nullptr) from.key = key;
      const char* address = zmq_msg_gets(frame.handle(), "Peer-Address");
      from.source = from.key + "@" + (address != nullptr ? address : "");
      // A peer that chose its own name could take that of another one, or one
      // that is gone. Those that libzmq gives begin with a zero.
      const bool counts =
          from.peer.starts_with('\0') && note_connection(from, frame) && !more;
      if (more) skip_parts(socket_.handle(), more);
      if (const auto p = peers_.find(from.peer); p != peers_.end())
        open_[p->second.fd].delivered = true;
      if (!counts || !inbox_.add(std::move(from), std::move(frame))) ++dropped_;
    }
    ready_.arm();
  }

  // What a peer does not take waits in memory.
  bool send_frame(const PeerId& peer, const std::string& frame) {
    const auto known = peers_.find(peer);
    Open* const open =
        known == peers_.end() ? nullptr : &open_[known->second.fd];
    if (open != nullptr) {
      const uint64_t acked = counts_of(known->second.fd).tcpi_bytes_acked;
      open->sent_bytes = std::max(open->sent_bytes, acked);
      // 0: nobody counts.
      if (acked > 0 && open->sent_bytes - acked > kMaxWaitingBytes)
        return false;
    }
    bool sent = false;
    try {
      sent = socket_.send(zmq::buffer(peer), zmq::send_flags::sndmore |
                                                 zmq::send_flags::dontwait) &&
             socket_.send(zmq::buffer(frame), zmq::send_flags::dontwait);
    } catch (const zmq::error_t& e) {
      CHECK_MSG(e.num() == EHOSTUNREACH, e.what());
    }
    if (sent && open != nullptr) open->sent_bytes += frame.size();
    if (has_input(socket_.handle())) ready_.arm();
    return sent;
  }

  void take_ticket(const Received& from, const std::string& text) {
    Status admitted = invalid_argument("this coordinator takes no tickets");
    const auto ticket = parse_ticket(text);
    if (!ticket.ok())
      admitted = ticket.status();
    else if (keys_.enrol)
      admitted = keys_.enrol(from.key, *ticket);
    const bool later = admitted.code() == Code::kUnavailable ||
                       admitted.code() == Code::kExhausted;
    (void)send_frame(
        from.peer,
        encode_note(section_text(
            {{"note", admitted.ok() ? "admitted" : "refused"},
             {"reason", admitted.message()},
             {"time", std::to_string(static_cast<int64_t>(keys_.clock()))},
             {"retry", later ? "yes" : ""}})));
  }

  // The monitor reports descriptors, messages name peers. A frame carries the
  // descriptor that it came from, which relates the two. Returns false if what
  // came over the connection does not count.
  bool note_connection(const Received& from, zmq::message_t& frame) {
    const PeerId& peer = from.peer;
    if (peers_.contains(peer)) return true;
    const int fd = zmq_msg_get(frame.handle(), ZMQ_SRCFD);
    if (fd < 0) return true;
    // Descriptor numbers are reused: first process the end of the connection
    // that had this one before.
    read_monitor();
    // libzmq gives no name twice: these are the last messages of the connection
    // that has ended, or another one took its name.
    if (const auto gone = gone_.find(peer); gone != gone_.end())
      return gone->second && (by_fd_.contains(fd) || !open_.contains(fd));
    if (auto old = by_fd_.find(fd); old != by_fd_.end()) lose(old->second);
    size_t& connections = of_source_[from.source];
    if (connections >= kMaxConnectionsOfSource) {
      crowded_source_ = from.source;
      shutdown(fd, SHUT_RDWR);
      remember(peer, /*counts=*/false);
      return false;
    }
    ++connections;
    end_silence(fd);
    by_fd_[fd] = peer;
    peers_[peer] = {fd, from.key, from.source};
    if (!open_.contains(fd))
      lose(PeerId(peer));  // has ended since
    else if (!news_.empty())
      (void)send_frame(peer, encode_note(news_));
    return true;
  }

  // By value: erasing may destroy the caller's copy.
  void lose(PeerId peer) {
    auto it = peers_.find(peer);
    if (it == peers_.end()) return;
    by_fd_.erase(it->second.fd);
    if (--of_source_[it->second.source] == 0)
      of_source_.erase(it->second.source);
    peers_.erase(it);
    lost_.push_back(peer);
    remember(std::move(peer), /*counts=*/true);
  }

  // A peer that is gone, messages of which may still be in the queue.
  void remember(PeerId peer, bool counts) {
    if (gone_.emplace(peer, counts).second)
      gone_order_.push_back(std::move(peer));
    if (gone_order_.size() > kRememberedLost) {
      gone_.erase(gone_order_.front());
      gone_order_.pop_front();
    }
  }

  void read_monitor() {
    while (const auto event = next_event(monitor_.handle())) {
      const auto [number, fd] = *event;
      if (number == ZMQ_EVENT_ACCEPTED) {
        note_accepted(fd);
      } else if (number == ZMQ_EVENT_DISCONNECTED) {
        end_silence(fd);
        open_.erase(fd);
        if (auto it = by_fd_.find(fd); it != by_fd_.end()) lose(it->second);
      }
    }
  }

  // Strangers must not use up the descriptors of the program, nor one host that
  // says nothing those of the others. Many may be about to speak.
  void note_accepted(int fd) {
    const Open& open = open_[fd] = {monotonic_ms(), host_of(fd)};
    prefer(fd);
    if (!open.silent_host.empty()) ++silent_of_[open.silent_host];
    if (open_.size() > max_connections_ ||
        (is_one_of_many(open) && open_.size() > max_connections_ / 2))
      shutdown(fd, SHUT_RDWR);
  }

  // Something has come over the connection, or it has ended.
  void end_silence(int fd) {
    const auto open = open_.find(fd);
    if (open == open_.end() || open->second.silent_host.empty()) return;
    const auto silent =
        silent_of_.find(std::exchange(open->second.silent_host, ""));
    if (--silent->second == 0) silent_of_.erase(silent);
  }

  struct Open {
    int64_t accepted_ms = 0;
    std::string silent_host;       // "": something has come over it
    bool delivered = false;        // a whole message, since the last look
    uint64_t delivered_bytes = 0;  // received up to a look after such a message
    uint64_t sent_bytes = 0;       // at least
  };

  // Of those of a host over which nothing has come.
  bool is_one_of_many(const Open& open) const {
    const auto silent = silent_of_.find(open.silent_host);
    return silent != silent_of_.end() &&
           silent->second > kMaxConnectionsOfSource;
  }

  struct Peer {
    int fd = -1;
    std::string key;
    std::string source;
  };

  ServerKeys keys_;
  std::function<bool(const Received&)> admits_;
  zmq::context_t context_;
  std::unique_ptr<Zap> zap_;
  zmq::socket_t socket_;
  zmq::socket_t monitor_;
  Inbox<zmq::message_t> inbox_;
  Readiness ready_;
  Readiness lost_ready_;
  const size_t max_connections_;
  std::string news_;  // the note that every client is sent
  std::string address_;
  uint64_t dropped_ = 0;
  std::optional<int> foreign_version_;
  std::string crowded_source_;
  std::map<int, Open> open_;                 // connections by descriptor
  std::map<std::string, size_t> silent_of_;  // connections by host
  int64_t looked_ms_ = 0;
  std::map<int, PeerId> by_fd_;
  std::map<PeerId, Peer> peers_;
  std::map<std::string, size_t> of_source_;  // connections
  std::map<PeerId, bool> gone_;              // whether what still comes counts
  std::deque<PeerId> gone_order_;
  std::vector<PeerId> lost_;
};

}  // namespace

Result<std::unique_ptr<Server>> Server::bind(
    const std::string& address, const std::optional<ServerKeys>& keys,
    int silence_ms) {
  RETURN_IF_ERROR(check_address(address));
  RETURN_IF_ERROR(check_free(address));
  try {
    auto server = std::make_unique<ServerImpl>(keys);
    RETURN_IF_ERROR(server->start(address, silence_ms));
    return std::unique_ptr<Server>(std::move(server));
  } catch (const zmq::error_t& e) {
    return internal("zeromq, " + address + ": " + e.what());
  }
}

}  // namespace remesh::wire
