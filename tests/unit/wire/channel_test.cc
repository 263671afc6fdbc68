#include "proto/wire/channel.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <set>
#include <string>
#include <thread>

#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/wire/elements.h"
#include "proto/wire/inbox.h"
#include "tests/testing/expect.h"
#include "tests/testing/process.h"

namespace remesh::wire {
namespace {

pb::Envelope report(const std::string& worker, uint64_t seq = 1) {
  pb::Envelope e;
  e.set_job("j");
  e.mutable_report()->set_worker(worker);
  e.mutable_report()->set_seq(seq);
  return e;
}

bool readable(int fd, int ms) {
  pollfd p{fd, POLLIN, 0};
  return poll(&p, 1, ms) == 1;
}

template <typename Peer>  // Server or Client
auto receive(Peer& p, int ms = 30000) {
  const int64_t end = monotonic_ms() + ms;
  do {
    if (auto r = p.receive()) return r;
    readable(p.fd(),
             static_cast<int>(std::max<int64_t>(0, end - monotonic_ms())));
  } while (monotonic_ms() < end);
  return decltype(p.receive())();
}

// The peers lost, once there are any.
std::vector<PeerId> take_lost(Server& s, int64_t ms = 30'000) {
  std::vector<PeerId> lost;
  const int64_t end = monotonic_ms() + ms;
  while (lost.empty() && monotonic_ms() < end) {
    readable(s.lost_fd(), 10);
    lost = s.take_lost();
  }
  return lost;
}

std::unique_ptr<Server> bind_or_die(
    const std::string& address = "tcp://127.0.0.1:0") {
  constexpr int kHour = 3'600'000;  // peers of a test answer no heartbeats
  return std::move(Server::bind(address, std::nullopt, kHour)).value();
}

std::unique_ptr<Client> connect_or_die(const std::string& address) {
  return std::move(Client::connect(address, std::nullopt)).value();
}

int num_fds() {
  int n = 0;
  DIR* d = opendir("/proc/self/fd");
  while (readdir(d) != nullptr) ++n;
  closedir(d);
  return n;
}

TEST(Channel, CarriesEnvelopesBothWays) {
  auto server = bind_or_die();
  EXPECT_EQ(server->address().rfind("tcp://127.0.0.1:", 0), 0u);
  EXPECT_NE(server->address(), "tcp://127.0.0.1:0");
  auto client = connect_or_die(server->address());
  for (uint64_t i = 0; i < 50; ++i) {
    ASSERT_TRUE(client->send(report("a", i)));
    auto r = receive(*server);
    ASSERT_TRUE(r);
    EXPECT_EQ(r->envelope.report().seq(), i);
    ASSERT_TRUE(server->send(r->peer, report("b", i)));
    auto back = receive(*client);
    ASSERT_TRUE(back);
    EXPECT_EQ(back->report().worker(), "b");
  }
  EXPECT_EQ(server->dropped_frames(), 0u);
}

TEST(Channel, CarriesLargeBlobs) {
  auto server = bind_or_die();
  auto client = connect_or_die(server->address());
  pb::Envelope e;
  e.mutable_fence_in()->set_blob(std::string(3 << 20, 'x'));
  ASSERT_TRUE(client->send(e));
  auto r = receive(*server);
  ASSERT_TRUE(r);
  EXPECT_EQ(r->envelope.fence_in().blob(), e.fence_in().blob());
}

// What is skipped is not counted, but a parser keeps it.
TEST(Elements, UnknownGroupsAreRefused) {
  const pb::Envelope e = report("a");
  const std::string plain = e.SerializeAsString();
  const auto few = [](const std::string& bytes) {
    return has_few_elements(*pb::Envelope::descriptor(), bytes.data(),
                            bytes.size(), 100);
  };
  EXPECT_TRUE(few(plain));
  EXPECT_TRUE(few(plain + "\xc0\x3e\x01"));  // an unknown number
  std::string group = "\xc3\x3e";            // of field 1000
  for (int i = 0; i < 1000; ++i) group += std::string("\x0a\0", 2);
  EXPECT_FALSE(few(plain + group + "\xc4\x3e"));
}

// Each of 8,192 ranks names the 128 members of the group that it waits for.
TEST(Elements, TheStatusOfALargeJobCanBeDecoded) {
  pb::Envelope e;
  for (int w = 0; w < 1024; ++w) {
    pb::WorkerStatus* worker =
        e.mutable_reply()->mutable_status()->add_workers();
    for (int i = 0; i < 8; ++i) {
      pb::RankOperation* at = worker->add_ranks()->mutable_at();
      at->set_name("all_reduce");
      at->set_group("dp");
      at->mutable_ranks()->Resize(128, 8191);
    }
  }
  const std::string frame = encode_frame(e);
  EXPECT_TRUE(decode_frame(frame.data(), frame.size()));
}

// The descriptor of ZeroMQ itself falls silent after a send that looked at
// the socket; ours must not.
TEST(Channel, DescriptorStaysReadableAfterASend) {
  auto server = bind_or_die();
  auto client = connect_or_die(server->address());
  ASSERT_TRUE(client->send(report("a")));
  auto r = receive(*server);
  ASSERT_TRUE(r);
  while (server->receive()) {
  }
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(client->send(report("a", i)));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_TRUE(server->send(r->peer, report("s")));
    ASSERT_TRUE(readable(server->fd(), 30000)) << i;
    while (server->receive()) {
    }
  }
}

TEST(Channel, ClientFindsARestartedServerSoon) {
  const std::string address = testing::own_address();
  auto server = bind_or_die(address);
  auto client = connect_or_die(address);
  ASSERT_TRUE(client->send(report("a", 1)));
  ASSERT_TRUE(receive(*server));
  server.reset();
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  server = bind_or_die(address);
  const int64_t start = monotonic_ms();
  ASSERT_TRUE(client->send(report("a", 2)));
  auto r = receive(*server);
  ASSERT_TRUE(r);
  EXPECT_EQ(r->envelope.report().seq(), 2u);
  RecordProperty("found_again_ms", static_cast<int>(monotonic_ms() - start));
}

TEST(Channel, ClientMayConnectBeforeTheServerListens) {
  const std::string address = testing::own_address();
  auto client = connect_or_die(address);
  ASSERT_TRUE(client->send(report("early")));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  auto server = bind_or_die(address);
  ASSERT_TRUE(receive(*server));
}

TEST(Channel, QueueOfAnAbsentServerIsBounded) {
  auto client = connect_or_die(testing::own_address());
  int sent = 0;
  while (sent < 100000 && client->send(report("a", sent))) ++sent;
  EXPECT_GT(sent, 10);
  EXPECT_LT(sent, 10000);
}

// The child is killed with its connection open: the server hears of it at
// once, from the kernel, not from a heartbeat.
TEST(Channel, KilledPeerIsLostBeforeAnyHeartbeat) {
  constexpr int64_t kHeartbeatsTakeMs = 3000;
  auto server = bind_or_die();
  auto steady = connect_or_die(server->address());
  ASSERT_TRUE(steady->send(report("steady")));
  ASSERT_TRUE(receive(*server));
  for (int round = 0; round < 5; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      auto c = Client::connect(server->address(), std::nullopt);
      if (!c.ok() || !(*c)->send(report("child"))) _exit(1);
      while (true) pause();
    }
    auto r = receive(*server);
    ASSERT_TRUE(r);
    ASSERT_EQ(r->envelope.report().worker(), "child");
    EXPECT_TRUE(server->take_lost().empty());
    kill(child, SIGKILL);
    const auto lost = take_lost(*server, kHeartbeatsTakeMs);
    waitpid(child, nullptr, 0);
    ASSERT_EQ(lost, std::vector<PeerId>{r->peer});
    while (server->send(r->peer, report("x")))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(server->take_lost().empty());
}

TEST(Channel, DescriptorsUsedAgainAreNotConfused) {
  auto server = bind_or_die();
  for (int i = 0; i < 30; ++i) {
    auto a = connect_or_die(server->address());
    ASSERT_TRUE(a->send(report("a", i)));
    auto first = receive(*server);
    ASSERT_TRUE(first);
    a.reset();
    auto b = connect_or_die(server->address());
    ASSERT_TRUE(b->send(report("b", i)));
    auto second = receive(*server);
    ASSERT_TRUE(second);
    ASSERT_EQ(take_lost(*server), std::vector<PeerId>{first->peer}) << i;
    ASSERT_TRUE(server->send(second->peer, report("s", i)));
    ASSERT_TRUE(receive(*b));
    b.reset();
    ASSERT_EQ(take_lost(*server), std::vector<PeerId>{second->peer}) << i;
  }
}

TEST(Channel, LastMessageBeforeDestructionGetsOut) {
  auto server = bind_or_die();
  for (int i = 0; i < 20; ++i) {
    {
      auto c = connect_or_die(server->address());
      ASSERT_TRUE(c->send(report("last", i)));
    }
    auto r = receive(*server);
    ASSERT_TRUE(r);
    EXPECT_EQ(r->envelope.report().seq(), static_cast<uint64_t>(i));
  }
}

TEST(Channel, SecondServerOnOneAddressIsRefused) {
  auto server = bind_or_die();
  auto second = Server::bind(server->address(), std::nullopt);
  EXPECT_EQ(second.status().code(), Code::kAlreadyExists);
  EXPECT_SAYS(second, server->address());
}

TEST(Channel, BadAddressesAreNamed) {
  for (const char* bad :
       {"", "127.0.0.1:5", "http://x:1", "tcp://", "tcp://127.0.0.1",
        "tcp://127.0.0.1:x", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:-0",
        "tcp://::1:5", "ipc://relative"}) {
    auto s = Server::bind(bad, std::nullopt);
    ASSERT_FALSE(s.ok()) << bad;
    EXPECT_SAYS(s, bad);
  }
  EXPECT_FALSE(Client::connect("nonsense", std::nullopt).ok());
  EXPECT_FALSE(Client::connect("tcp://127.0.0.1:port", std::nullopt).ok());
}

// As at boot, before the network is up.
TEST(Channel, AnAddressThatThisHostLacksMayComeLater) {
  for (const char* absent : {"tcp://nonesuch9:5710", "tcp://192.0.2.1:5710"}) {
    const auto s = Server::bind(absent, std::nullopt);
    ASSERT_FALSE(s.ok()) << absent;
    EXPECT_EQ(exit_code_of(s.status()), kExitTryAgain)
        << s.status().to_string();
  }
}

TEST(Channel, LeavesNoDescriptors) {
  {
    auto server = bind_or_die();
    auto client = connect_or_die(server->address());
  }
  const int before = num_fds();
  for (int i = 0; i < 10; ++i) {
    auto server = bind_or_die();
    auto client = connect_or_die(server->address());
    ASSERT_TRUE(client->send(report("a")));
    ASSERT_TRUE(receive(*server));
  }
  EXPECT_EQ(num_fds(), before);
}

// A heartbeat. Its answer tells that libzmq has read what was sent before.
const std::string kPing("\4\7\4PING\0\0", 9);

// A peer that speaks ZMTP 3.1 by hand.
class RawPeer {
 public:
  explicit RawPeer(const std::string& address) {
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(
        std::stoi(address.substr(address.rfind(':') + 1))));
    inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    if (connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0)
      abort();
  }
  explicit RawPeer(int fd) : fd_(fd) {}
  ~RawPeer() {
    if (fd_ >= 0) close(fd_);
  }
  void send_bytes(const std::string& bytes) {
    (void)!::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  static std::string framed(const std::string& frame) {
    std::string head("\2");  // a long one
    for (int shift = 56; shift >= 0; shift -= 8)
      head += static_cast<char>(frame.size() >> shift);
    return head + frame;
  }
  void send_frame(const std::string& frame) { send_bytes(framed(frame)); }
  // `name`: chosen by the peer; "": libzmq gives it one.
  void handshake(const std::string& name = "") {
    std::string greeting("\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL", 16);
    greeting.resize(64, '\0');
    send_bytes(greeting);
    char theirs[64];
    (void)!recv(fd_, theirs, sizeof(theirs), MSG_WAITALL);
    std::string body = std::string("\5READY\13Socket-Type", 18) +
                       std::string("\0\0\0\6DEALER", 10);
    if (!name.empty())
      body += std::string("\10Identity\0\0\0", 12) +
              static_cast<char>(name.size()) + name;
    send_bytes(std::string("\4") + static_cast<char>(body.size()) + body);
    // Their READY: a command of less than 256 bytes.
    unsigned char head[2] = {};
    (void)!recv(fd_, head, sizeof(head), MSG_WAITALL);
    std::string rest(head[1], '\0');
    (void)!recv(fd_, rest.data(), rest.size(), MSG_WAITALL);
  }
  // Whether these bytes arrive.
  bool receives(const std::string& bytes) {
    std::string got;
    char buf[4096];
    for (const int64_t end = monotonic_ms() + 30000;
         monotonic_ms() < end && got.find(bytes) == std::string::npos;) {
      if (!readable(fd_, 50)) continue;
      const ssize_t n = read(fd_, buf, sizeof(buf));
      if (n <= 0) return false;
      got.append(buf, static_cast<size_t>(n));
    }
    return got.find(bytes) != std::string::npos;
  }
  // What was sent before is in the server's queue. libzmq answers a PING before
  // it delivers the messages that it has read with it, so it takes two.
  bool is_read() {
    for (int i = 0; i < 2; ++i) {
      send_bytes(kPing);
      if (!receives("PONG")) return false;
    }
    return true;
  }
  // Ends the connection with a reset, as the kernel does for a peer that dies
  // while it has not read everything.
  void reset() {
    const linger at_once{1, 0};
    (void)setsockopt(fd_, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    close(std::exchange(fd_, -1));
  }
  // True when the other side closes within the time.
  bool closed_within(int ms) {
    const int64_t end = monotonic_ms() + ms;
    char buf[4096];
    while (monotonic_ms() < end) {
      if (!readable(fd_, 50)) continue;
      if (read(fd_, buf, sizeof(buf)) <= 0) return true;
    }
    // This process may have been stopped meanwhile.
    while (readable(fd_, 0))
      if (read(fd_, buf, sizeof(buf)) <= 0) return true;
    return false;
  }

 private:
  int fd_ = -1;
};

// It answers no heartbeat.
TEST(Channel, ASilentPeerIsLostAfterTheServersOwnLimit) {
  auto patient = Server::bind("tcp://127.0.0.1:0", std::nullopt, 600'000);
  auto strict = Server::bind("tcp://127.0.0.1:0", std::nullopt, 200);
  ASSERT_TRUE(patient.ok() && strict.ok());
  RawPeer a((*patient)->address()), b((*strict)->address());
  a.handshake();
  b.handshake();
  EXPECT_TRUE(b.closed_within(60'000));
  EXPECT_FALSE(a.closed_within(kSilenceMs + 2000));
}

TEST(Channel, OversizeFrameEndsOnlyItsConnection) {
  auto server = bind_or_die();
  auto good = connect_or_die(server->address());
  ASSERT_TRUE(good->send(report("good")));
  ASSERT_TRUE(receive(*server));
  RawPeer raw(server->address());
  raw.handshake();
  raw.send_frame(encode_frame(report("raw")));
  ASSERT_TRUE(receive(*server));
  raw.send_bytes(std::string("\2\0\0\1\0\0\0\0\0", 9));  // 2^40 bytes follow
  EXPECT_TRUE(raw.closed_within(60'000));
  ASSERT_TRUE(good->send(report("good", 2)));
  ASSERT_TRUE(receive(*server));
}

// libzmq keeps the parts of a message, whose number has no limit, until the
// last one has come.
TEST(Channel, AMessageThatNeverEndsClosesItsConnection) {
  auto server = bind_or_die();
  RawPeer raw(server->address());
  raw.handshake();
  for (int i = 0; i < 20; ++i) {
    raw.send_frame(encode_frame(report(std::string(3 << 20, 'w'))));
    ASSERT_TRUE(receive(*server));
  }
  const auto is_closed = [&] {
    server->close_offenders();
    return raw.closed_within(100);
  };
  for (int i = 0; i < 15; ++i) ASSERT_FALSE(is_closed()) << "they have ended";
  std::string part = RawPeer::framed(std::string(1 << 20, 'x'));
  part[0] = '\3';  // more follow
  for (int i = 0; i < 64; ++i) raw.send_bytes(part);
  const int64_t end = monotonic_ms() + 60'000;
  bool closed = false;
  while (!closed && monotonic_ms() < end) closed = is_closed();
  EXPECT_TRUE(closed);
}

// Connections of one sender are counted once they have sent a message.
TEST(Channel, ManyFirstMessagesThatDoNotEndCloseTheirConnections) {
  auto server = bind_or_die();
  std::string part = RawPeer::framed(std::string(100 << 10, 'x'));
  part[0] = '\3';  // more follow
  std::vector<std::unique_ptr<RawPeer>> peers;
  const auto add = [&] {
    peers.push_back(std::make_unique<RawPeer>(server->address()));
    peers.back()->handshake();
    peers.back()->send_bytes(part);
  };
  const auto is_closed = [&] {
    server->close_offenders(/*silent_ms=*/1'000'000);
    return peers.front()->closed_within(100);
  };
  for (size_t i = 0; i < kMaxConnectionsOfSource; ++i) add();
  for (int i = 0; i < 15; ++i) ASSERT_FALSE(is_closed()) << "they are few";
  add();
  bool closed = false;
  for (int i = 0; i < 600 && !closed; ++i) closed = is_closed();
  EXPECT_TRUE(closed);
}

TEST(Channel, AnswersThatAreNotReadTakeLimitedMemory) {
  auto server = bind_or_die();
  RawPeer raw(server->address());
  raw.handshake();
  raw.send_frame(encode_frame(report("raw")));
  const auto r = receive(*server);
  ASSERT_TRUE(r);
  const pb::Envelope answer = report(std::string(8 << 20, 'a'));
  int sent = 0;
  while (sent < 40 && server->send(r->peer, answer)) ++sent;
  EXPECT_GE(sent, 2);
  EXPECT_LT(sent, 20) << "besides what the kernel buffers";
  auto good = connect_or_die(server->address());
  ASSERT_TRUE(good->send(report("good")));
  const auto other = receive(*server);
  ASSERT_TRUE(other);
  EXPECT_TRUE(server->send(other->peer, answer));
  EXPECT_TRUE(receive(*good));
  // Once it reads them it gets more.
  bool again = false;
  for (int i = 0; i < 1000 && !again; ++i) {
    ASSERT_FALSE(raw.closed_within(50));
    again = server->send(r->peer, report("more"));
  }
  EXPECT_TRUE(again);
}

TEST(Channel, InvalidEnvelopesAreCountedAndDropped) {
  auto server = bind_or_die();
  RawPeer raw(server->address());
  raw.handshake();
  raw.send_bytes(std::string("\0\5hello", 7));        // wrong head
  raw.send_bytes(std::string("\0\0", 2));             // empty
  raw.send_bytes(std::string("\1\1a\1\1b\0\1c", 9));  // three parts
  std::string wrong = encode_frame(report("w"));
  wrong[4] = 2;  // another version
  raw.send_frame(wrong);
  raw.send_frame(encode_frame(report("right")));
  auto r = receive(*server);
  ASSERT_TRUE(r) << server->dropped_frames();
  EXPECT_EQ(r->envelope.report().worker(), "right");
  EXPECT_EQ(server->dropped_frames(), 4u);
}

// Two bytes on the wire become an object of hundreds in memory.
TEST(Channel, AFrameOfVeryManyElementsIsDropped) {
  auto server = bind_or_die();
  RawPeer raw(server->address());
  raw.handshake();
  const int most = kMaxRequestBytes / kBytesPerElement;
  pb::Envelope e = report("many");
  while (e.report().ranks_size() < most - 3) e.mutable_report()->add_ranks();
  raw.send_frame(encode_frame(e));
  auto r = receive(*server);
  ASSERT_TRUE(r) << "within the limit, with the job, the report and its worker";
  EXPECT_EQ(r->envelope.report().ranks_size(), most - 3);
  e.mutable_report()->add_ranks();
  raw.send_frame(encode_frame(e));
  // Unknown fields are kept in memory as well.
  raw.send_frame(encode_frame(report("w")) + std::string(3 * most, '\xf8') +
                 std::string(1, '\0'));
  std::string unknown;
  for (int i = 0; i <= most; ++i) unknown += std::string("\xf8\x01\0", 3);
  raw.send_frame(encode_frame(report("w")) + unknown);
  raw.send_frame(encode_frame(report("right")));
  r = receive(*server);
  ASSERT_TRUE(r);
  EXPECT_EQ(r->envelope.report().worker(), "right");
  EXPECT_EQ(server->dropped_frames(), 3u);
}

TEST(Channel, MessagesThatThePeerWouldRefuseAreNotSent) {
  auto server = bind_or_die();
  auto client = connect_or_die(server->address());
  EXPECT_FALSE(client->send(report(std::string(kMaxRequestBytes + 1, 'w'))));
  ASSERT_TRUE(client->send(report("w")));
  const auto r = receive(*server);
  ASSERT_TRUE(r);
  EXPECT_FALSE(
      server->send(r->peer, report(std::string(kMaxAnswerBytes + 1, 'w'))));
}

// libzmq 4.3.4 aborts the program if a connection is reset while its input
// waits for room, and then a heartbeat is due, or a peer's one is processed.
TEST(Channel, AConnectionResetWithAFullQueueEndsOnlyItself) {
  for (const bool reads : {false, true}) {
    auto server = bind_or_die();
    RawPeer raw(server->address());
    raw.handshake();
    for (int i = 0; i < 50; ++i)
      raw.send_bytes(RawPeer::framed(encode_frame(report("raw"))) + kPing);
    ASSERT_TRUE(raw.receives("PONG"));
    raw.reset();
    if (!reads) {
      EXPECT_TRUE(readable(server->lost_fd(), 30'000));
    }
    auto good = connect_or_die(server->address());
    ASSERT_TRUE(good->send(report("good")));
    while (true) {
      const auto r = receive(*server);
      ASSERT_TRUE(r);
      if (r->envelope.report().worker() == "good") break;
    }
  }
}

TEST(Channel, ThePendingMessagesOfAPeerAreBounded) {
  auto server = bind_or_die();
  RawPeer raw(server->address());
  raw.handshake();
  auto good = connect_or_die(server->address());
  const size_t most[] = {4, kMaxWaitingFrames};
  const std::string names[] = {std::string(kMaxRequestBytes - 100, 'w'), "w"};
  for (int i = 0; i < 2; ++i) {
    SCOPED_TRACE(i);
    const std::string frame = RawPeer::framed(encode_frame(report(names[i])));
    size_t of_raw = 0, sent = 0;
    for (; sent < 2 * most[i]; ++sent) raw.send_bytes(frame);
    ASSERT_TRUE(raw.is_read());
    const uint64_t dropped = server->dropped_frames();
    ASSERT_TRUE(good->send(report("good")));
    while (of_raw + server->dropped_frames() - dropped < sent) {
      const auto r = receive(*server);
      ASSERT_TRUE(r);
      if (r->envelope.report().worker() != "good") ++of_raw;
    }
    EXPECT_EQ(of_raw, most[i]);
  }
}

TEST(Channel, PeersTakeTurns) {
  auto server = bind_or_die();
  RawPeer raw(server->address());
  raw.handshake();
  for (int i = 0; i < 100; ++i) raw.send_frame(encode_frame(report("raw")));
  ASSERT_TRUE(raw.is_read());
  RawPeer other(server->address());
  other.handshake();
  other.send_frame(encode_frame(report("other")));
  ASSERT_TRUE(other.is_read());
  std::set<std::string> first;
  for (int i = 0; i < 2; ++i) {
    // libzmq looks for new connections once in three million ticks only.
    usleep(20'000);
    const auto r = receive(*server);
    ASSERT_TRUE(r);
    first.insert(r->envelope.report().worker());
  }
  EXPECT_EQ(first, (std::set<std::string>{"raw", "other"}));
}

// However many connections one sender has.
TEST(Inbox, SourcesTakeTurnsAndThenTheirPeers) {
  Inbox<std::string> inbox;
  for (int i = 0; i < 256; ++i)
    for (int n = 0; n < 2; ++n)
      ASSERT_TRUE(
          inbox.add({.peer = "a" + std::to_string(i), .source = "a"}, "frame"));
  for (int i = 0; i < 10; ++i)
    ASSERT_TRUE(inbox.add({.peer = "b", .source = "b"}, "frame"));
  std::set<PeerId> of_a;
  for (int i = 0; i < 10; ++i) {
    of_a.insert(inbox.next()->first.peer);
    EXPECT_EQ(inbox.next()->first.peer, "b");
  }
  EXPECT_EQ(of_a.size(), 10U);
  int left = 0;
  while (inbox.next()) ++left;
  EXPECT_EQ(left, 2 * 256 - 10);
}

TEST(Channel, AMessageThatIsNotAdmittedIsNotDecoded) {
  auto server = bind_or_die();
  int asked = 0;
  server->limit([&](const Received& r) {
    EXPECT_EQ(r.source, "@127.0.0.1");
    EXPECT_EQ(r.envelope.body_case(), pb::Envelope::BODY_NOT_SET);
    return ++asked > 3;
  });
  RawPeer raw(server->address());
  raw.handshake();
  std::string other = encode_frame(report("w"));
  other[4] = static_cast<char>(kVersion + 1);
  raw.send_frame(other);
  raw.send_frame("hello");
  raw.send_frame(encode_frame(report("wrong")));
  raw.send_frame(encode_frame(report("right")));
  const auto r = receive(*server);
  ASSERT_TRUE(r);
  EXPECT_EQ(r->envelope.report().worker(), "right");
  EXPECT_EQ(asked, 4);
  EXPECT_EQ(server->dropped_frames(), 0u);
  EXPECT_EQ(server->foreign_version(), std::nullopt);
}

TEST(Channel, OneSenderHasALimitedNumberOfConnections) {
  constexpr int kMinute = 60'000;  // these peers answer no heartbeats
  auto server =
      std::move(Server::bind("tcp://127.0.0.1:0", std::nullopt, kMinute))
          .value();
  std::vector<std::unique_ptr<RawPeer>> peers;
  for (size_t i = 0; i <= kMaxConnectionsOfSource; ++i) {
    peers.push_back(std::make_unique<RawPeer>(server->address()));
    peers.back()->handshake();
    const std::string frame = RawPeer::framed(encode_frame(report("w")));
    peers.back()->send_bytes(frame + frame);
    if (i == kMaxConnectionsOfSource) break;
    for (int n = 0; n < 2; ++n) {
      const auto r = receive(*server);
      ASSERT_TRUE(r);
      EXPECT_EQ(r->source, "@127.0.0.1");
    }
  }
  EXPECT_EQ(server->crowded_source(), "");
  while (server->dropped_frames() < 2) ASSERT_FALSE(receive(*server, 20));
  EXPECT_EQ(server->crowded_source(), "@127.0.0.1");
  EXPECT_TRUE(peers.back()->closed_within(60'000));
  // One that ends makes room.
  peers.erase(peers.begin(), peers.begin() + 1);
  while (server->take_lost().empty()) readable(server->lost_fd(), 3000);
  RawPeer next(server->address());
  next.handshake();
  next.send_frame(encode_frame(report("w")));
  ASSERT_TRUE(receive(*server));
  EXPECT_FALSE(next.closed_within(300));
}

// It would be no connection of its sender, and outlive the sender's key.
TEST(Channel, TheNameOfAPeerThatIsGoneIsNotTakenByAnother) {
  const std::string name("\0a", 2);
  auto server = bind_or_die();
  {
    RawPeer first(server->address());
    first.handshake(name);
    first.send_frame(encode_frame(report("first")));
    const auto r = receive(*server);
    ASSERT_TRUE(r);
    EXPECT_EQ(r->peer, name);
  }
  while (server->take_lost().empty()) readable(server->lost_fd(), 3000);
  // libzmq, too, has to forget the first one.
  auto good = connect_or_die(server->address());
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(good->send(report("good")));
    ASSERT_TRUE(receive(*server));
  }
  RawPeer second(server->address());
  second.handshake(name);
  second.send_frame(encode_frame(report("second")));
  for (int i = 0; i < 1000 && server->dropped_frames() == 0; ++i)
    ASSERT_FALSE(receive(*server, 20));
  EXPECT_EQ(server->dropped_frames(), 1u);
}

TEST(Channel, AHostThatSaysNothingDoesNotTakeAllConnections) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = 800;  // for 600 connections
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  auto server = bind_or_die();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  std::vector<std::unique_ptr<RawPeer>> peers;
  for (int i = 0; i <= 300; ++i) {
    peers.push_back(std::make_unique<RawPeer>(server->address()));
    peers.back()->handshake();
    (void)server->take_lost();
  }
  EXPECT_TRUE(peers.back()->closed_within(60'000));
  // Those that speak leave room.
  for (int i = 0; i < 100; ++i) {
    peers.at(i)->send_frame(encode_frame(report("w")));
    ASSERT_TRUE(receive(*server)) << i;
  }
  RawPeer next(server->address());
  next.handshake();
  next.send_frame(encode_frame(report("next")));
  ASSERT_TRUE(receive(*server));
}

TEST(Channel, AServerMayStopReceivingAndIsWokenAgain) {
  auto server = bind_or_die();
  auto client = connect_or_die(server->address());
  ASSERT_TRUE(client->send(report("a")));
  ASSERT_TRUE(client->send(report("b", 2)));
  ASSERT_TRUE(receive(*server));
  server->receive_later();
  pollfd ready{server->fd(), POLLIN, 0};
  EXPECT_EQ(poll(&ready, 1, 0), 1);
  EXPECT_TRUE(receive(*server));
}

std::string other_version(std::string frame) {
  frame[4] = static_cast<char>(kVersion + 1);
  return frame;
}

TEST(Channel, AnotherWireVersionIsAnsweredWithOurs) {
  auto server = bind_or_die();
  RawPeer raw(server->address());
  raw.handshake();
  raw.send_frame(other_version(encode_frame(report("w"))));
  while (!server->foreign_version()) EXPECT_FALSE(receive(*server, 20));
  EXPECT_TRUE(raw.receives(encode_frame(report("w")).substr(0, 8)));
}

// A server that accepts connections and does nothing by itself.
class RawServer {
 public:
  RawServer() {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(at);
    if (bind(fd_, reinterpret_cast<sockaddr*>(&at), size) != 0 ||
        listen(fd_, 1) != 0 ||
        getsockname(fd_, reinterpret_cast<sockaddr*>(&at), &size) != 0)
      abort();
    address_ = "tcp://127.0.0.1:" + std::to_string(ntohs(at.sin_port));
  }
  ~RawServer() { close(fd_); }
  const std::string& address() const { return address_; }
  RawPeer accept() { return RawPeer(::accept(fd_, nullptr, nullptr)); }

 private:
  int fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::string address_;
};

TEST(Channel, AClientLearnsTheVersionOfItsServer) {
  RawServer server;
  auto client = connect_or_die(server.address());
  RawPeer raw = server.accept();
  raw.handshake();
  EXPECT_EQ(client->foreign_version(), std::nullopt);
  raw.send_frame(other_version(encode_frame(report("w")).substr(0, 8)));
  while (!client->foreign_version()) EXPECT_FALSE(receive(*client, 20));
  EXPECT_EQ(client->foreign_version(), kVersion + 1);
}

// It answers no heartbeat.
TEST(Channel, ASilentServerIsLostAfterTheClientsOwnLimit) {
  RawServer calm, dull;
  auto patient = std::move(Client::connect(calm.address(), std::nullopt, false,
                                           /*silence_ms=*/600'000))
                     .value();
  auto strict = std::move(Client::connect(dull.address(), std::nullopt, false,
                                          /*silence_ms=*/200))
                    .value();
  RawPeer a = calm.accept(), b = dull.accept();
  a.handshake();
  b.handshake();
  EXPECT_TRUE(b.closed_within(60'000));
  EXPECT_FALSE(a.closed_within(kSilenceMs + 2000));
}

// A server with keys may have closed before the client has read its greeting.
TEST(Channel, AClientWithoutAKeyLearnsThatItIsRefused) {
  RawServer server;
  auto client = connect_or_die(server.address());
  // A reset before the client has begun is a connection that failed.
  const auto refuse = [&] {
    RawPeer peer = server.accept();
    EXPECT_TRUE(peer.receives("\xff"));  // the first byte of a greeting
    peer.reset();
  };
  refuse();
  EXPECT_FALSE(receive(*client, 0));
  EXPECT_EQ(client->trouble(), "") << "a coordinator that ends does so too";
  for (int i = 0; i < 20 && client->trouble().empty(); ++i) {
    refuse();
    EXPECT_FALSE(receive(*client, 0));
  }
  EXPECT_HAS(client->trouble(), "demands a key");
  RawPeer last = server.accept();
  last.handshake();
  while (!client->trouble().empty()) EXPECT_FALSE(receive(*client, 20));
}

// As a coordinator that is frozen: the kernel accepts its connections.
TEST(Channel, AServerThatSaysNothingDoesNotHaveAnotherKey) {
  RawServer server;
  auto client =
      std::move(Client::connect(
                    server.address(),
                    ClientKeys{new_key_pair(), new_key_pair().public_key}))
          .value();
  EXPECT_TRUE(server.accept().closed_within(60'000));
  RawPeer next = server.accept();
  EXPECT_FALSE(receive(*client, 0));
  EXPECT_EQ(client->trouble(), "");
  EXPECT_TRUE(next.receives("\xff"));
  next.reset();  // as a server with another key
  while (client->trouble().empty()) EXPECT_FALSE(receive(*client, 20));
  EXPECT_HAS(client->trouble(), "expected key");
}

TEST(Channel, BytesThatAreNotZmtpDoNoHarm) {
  auto server = bind_or_die();
  {
    RawPeer raw(server->address());
    raw.send_bytes("GET / HTTP/1.1\r\nHost: x\r\n\r\n" +
                   std::string(2000, 'z'));
    RawPeer idle(server->address());
    auto good = connect_or_die(server->address());
    ASSERT_TRUE(good->send(report("good")));
    ASSERT_TRUE(receive(*server));
  }
}

}  // namespace
}  // namespace remesh::wire
