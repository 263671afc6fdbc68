// Who gets in: keys, tickets, revocation, rotation, strangers.
#include "proto/wire/keys.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <thread>

#include "proto/base/clock.h"
#include "proto/wire/channel.h"
#include "proto/wire/key_choice.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"

namespace remesh::wire {
namespace {

constexpr int64_t kNothingMs = 1200;  // several attempts to connect
constexpr int64_t kLoadMs = 30'000;   // more, on a busy machine

pb::Envelope report(const std::string& worker) {
  pb::Envelope e;
  e.mutable_report()->set_worker(worker);
  return e;
}

std::unique_ptr<Client> client_of(const std::string& address,
                                  const std::optional<ClientKeys>& keys) {
  return std::move(Client::connect(address, keys)).value();
}

// A server with one member, whose key is allowed.
class KeysTest : public ::testing::Test {
 protected:
  void SetUp() override { start(); }

  void start(const std::string& address = "tcp://127.0.0.1:0") {
    ASSERT_OK_AND(
        bound_,
        Server::bind(address,
                     ServerKeys{server_,
                                [this](const auto& key, const auto& t) {
                                  return enrol(key, t);
                                },
                                [this] { return unix_seconds() + ahead_s_; }}));
    bound_->allow({member_.public_key, join_.public_key});
  }

  Status enrol(const std::string& key, const Ticket& ticket) {
    if (key != join_.public_key) return invalid_argument("not a job secret");
    const double left_s =
        static_cast<double>(ticket.expires) - unix_seconds() - ahead_s_;
    if (left_s < 0 || left_s > 2 * kTicketGoodForS)
      return unavailable("the clock is wrong");
    RETURN_IF_ERROR(later_);
    admitted_.push_back(ticket);
    bound_->allow({member_.public_key, join_.public_key, ticket.public_key});
    return ok_status();
  }

  std::unique_ptr<Client> connect(const KeyPair& own,
                                  const std::string& server = "") const {
    return client_of(
        bound_->address(),
        ClientKeys{own, server.empty() ? server_.public_key : server});
  }

  // Sends from all clients until the server receives something; for `ms`, and
  // if that is not `enough` yet, for longer.
  std::optional<Received> hear(
      const std::vector<Client*>& clients, int64_t ms = 30'000,
      const std::function<bool()>& enough = [] { return true; }) const {
    const int64_t end = monotonic_ms() + ms;
    for (int64_t next = 0; monotonic_ms() < end ||
                           (monotonic_ms() < end + kLoadMs && !enough());) {
      if (monotonic_ms() >= next) {
        for (Client* c : clients) (void)c->send(report("w"));
        next = monotonic_ms() + 50;
      }
      for (Client* c : clients) (void)c->receive();
      if (auto r = bound_->receive()) return r;
      (void)bound_->take_lost();
      pollfd p{bound_->fd(), POLLIN, 0};
      poll(&p, 1, 5);
    }
    return std::nullopt;
  }
  // Until the client has everything that was sent to it so far: messages of a
  // connection keep their order.
  void take_all(Client* client, const PeerId& peer) const {
    ASSERT_TRUE(bound_->send(peer, report("all")));
    while (true) {
      const auto e = client->receive();
      if (e && e->report().worker() == "all") return;
      usleep(1000);
    }
  }
  bool hears(Client* client, int64_t ms = 30'000) const {
    return hear({client}, ms).has_value();
  }
  // Not heard, and told why.
  bool turned_away(Client* client, const std::string& why, int64_t ms) const {
    const auto told = [&] {
      return client->trouble().find(why) != std::string::npos;
    };
    return !hear({client}, ms, told) && told();
  }
  void drain() const {
    while (bound_->receive()) continue;
  }

  const KeyPair member_ = new_key_pair();
  const KeyPair join_ = new_key_pair();
  KeyPair server_ = new_key_pair();
  std::vector<Ticket> admitted_;
  Status later_;        // of tickets that are good otherwise
  double ahead_s_ = 0;  // the server's clock
  std::unique_ptr<Server> bound_;
};

// One key in 85 begins with a minus by chance.
TEST(KeyPairTest, PublicKeysAreNoOptions) {
  for (int i = 0; i < 2000; ++i)
    ASSERT_NE(new_key_pair().public_key.front(), '-');
}

TEST_F(KeysTest, TheLargestMessageArrivesEncrypted) {
  auto client = connect(member_);
  ASSERT_TRUE(hears(client.get()));
  pb::Envelope e = report(std::string(kMaxRequestBytes, 'w'));
  std::string* name = e.mutable_report()->mutable_worker();
  name->resize(name->size() - (e.ByteSizeLong() - kMaxRequestBytes));
  ASSERT_EQ(e.ByteSizeLong(), static_cast<size_t>(kMaxRequestBytes));
  ASSERT_TRUE(client->send(e));
  for (int i = 0; i < 3000; ++i) {
    const auto r = bound_->receive();
    if (r && r->envelope.ByteSizeLong() == e.ByteSizeLong()) return;
    if (!r) usleep(10'000);
  }
  FAIL() << "its connection was closed";
}

TEST_F(KeysTest, AMembersMessagesArriveWithItsKey) {
  auto client = connect(member_);
  const auto r = hear({client.get()});
  ASSERT_TRUE(r);
  EXPECT_EQ(r->key, member_.public_key);
  ASSERT_TRUE(bound_->send(r->peer, report("back")));
  for (int i = 0; i < 3000; ++i) {
    if (auto e = client->receive()) {
      EXPECT_EQ(e->report().worker(), "back");
      EXPECT_EQ(client->trouble(), "");
      EXPECT_FALSE(client->refused());
      return;
    }
    usleep(10'000);
  }
  FAIL() << "no answer";
}

TEST_F(KeysTest, MessagesOfUnknownKeysAreDropped) {
  auto wrong = connect(new_key_pair());
  auto none = client_of(bound_->address(), std::nullopt);
  auto other_server = connect(member_, new_key_pair().public_key);
  EXPECT_FALSE(hear({wrong.get(), none.get(), other_server.get()},
                    kRefusedMs + 1000, [&] { return wrong->refused(); }));
  EXPECT_TRUE(wrong->refused());
  EXPECT_TRUE(turned_away(wrong.get(), "does not allow this key", 0));
  EXPECT_TRUE(turned_away(none.get(), "demands a key", 0));
  EXPECT_TRUE(turned_away(other_server.get(), "expected key", 0));
  EXPECT_FALSE(other_server->refused());
}

// An unauthenticated server is not talked to either.
TEST_F(KeysTest, AServerWithoutKeysIsNotTrusted) {
  auto plain =
      std::move(Server::bind("tcp://127.0.0.1:0", std::nullopt)).value();
  auto client =
      client_of(plain->address(), ClientKeys{member_, server_.public_key});
  EXPECT_TRUE(turned_away(client.get(), "--no-auth", kNothingMs));
  EXPECT_FALSE(plain->receive());
}

TEST_F(KeysTest, NobodyIsAllowedBeforeAllowIsCalled) {
  bound_->allow({});
  auto client = connect(member_);
  EXPECT_FALSE(hears(client.get(), kNothingMs));
  bound_->allow({member_.public_key});  // as `remesh key allow` does
  EXPECT_TRUE(hears(client.get()));
  EXPECT_FALSE(client->refused());
}

TEST_F(KeysTest, ARevokedMemberIsLostAtOnceAndItsMessagesAreDropped) {
  auto client = connect(member_);
  const auto r = hear({client.get()});
  ASSERT_TRUE(r);
  (void)client->send(report("w"));  // may have arrived when it is revoked
  usleep(100'000);
  const int64_t revoked = monotonic_ms();
  bound_->allow({});
  std::vector<PeerId> lost;
  while (lost.empty() && monotonic_ms() - revoked < 30'000) {
    EXPECT_FALSE(bound_->receive());
    lost = bound_->take_lost();
    usleep(1000);
  }
  EXPECT_EQ(lost, std::vector<PeerId>{r->peer});
  EXPECT_FALSE(hears(client.get(), kNothingMs));
}

TEST_F(KeysTest, MembersSurviveANewKeyOfTheServer) {
  auto client = connect(member_);
  const auto first = hear({client.get()});
  ASSERT_TRUE(first);
  const KeyPair next = new_key_pair();
  bound_->announce(next.public_key);
  auto late = connect(member_);
  auto second = hear({late.get()});
  while (second && second->peer == first->peer) second = hear({late.get()});
  ASSERT_TRUE(second);
  take_all(client.get(), first->peer);
  take_all(late.get(), second->peer);
  const std::string address = bound_->address();
  bound_.reset();
  server_ = next;
  start(address);
  EXPECT_TRUE(hears(client.get()));
  drain();
  EXPECT_TRUE(hears(late.get()));
}

// Attempts with the old key, for which messages wait, must not end the
// connection that was opened with the new one.
TEST_F(KeysTest, TheNewKeyOfTheServerIsKept) {
  auto client = connect(member_);
  const auto r = hear({client.get()});
  ASSERT_TRUE(r);
  const KeyPair next = new_key_pair();
  bound_->announce(next.public_key);
  take_all(client.get(), r->peer);
  const std::string address = bound_->address();
  bound_.reset();
  for (int i = 0; i < 20; ++i) (void)client->send(report("w"));
  server_ = next;
  start(address);
  ASSERT_TRUE(hears(client.get()));
  for (const int64_t end = monotonic_ms() + kNothingMs; monotonic_ms() < end;) {
    (void)client->send(report("w"));
    (void)client->receive();
    drain();
    EXPECT_TRUE(bound_->take_lost().empty());
    usleep(10'000);
  }
}

// ------------------------------------------------------------------ tickets

class TicketTest : public KeysTest {
 protected:
  std::unique_ptr<Client> enrolling(const KeyPair& own,
                                    const KeyPair& join) const {
    return client_of(bound_->address(),
                     ClientKeys{own, server_.public_key,
                                ClientKeys::Enrolment{join, "node1", "job"}});
  }
};

TEST_F(TicketTest, TheHolderOfTheJobSecretIsAdmitted) {
  const KeyPair own = new_key_pair();
  auto client = enrolling(own, join_);
  const auto r = hear({client.get()});
  ASSERT_TRUE(r);
  EXPECT_EQ(r->key, own.public_key);
  ASSERT_EQ(admitted_.size(), 1u);
  EXPECT_EQ(admitted_[0].worker, "node1");
  EXPECT_EQ(admitted_[0].job, "job");
  // A restarted server has forgotten it.
  const std::string address = bound_->address();
  bound_.reset();
  start(address);
  EXPECT_TRUE(hears(client.get()));
  EXPECT_EQ(admitted_.size(), 2u);
}

// A coordinator that is started again lets keys in before it reads tickets,
// which may take longer than a refused key is tried.
TEST_F(TicketTest, AForgottenWorkerWaitsForABusyServer) {
  auto client = enrolling(new_key_pair(), join_);
  ASSERT_TRUE(hears(client.get()));
  const std::string address = bound_->address();
  bound_.reset();
  start(address);
  bool forgotten = false;
  for (const int64_t end = monotonic_ms() + 3'500; monotonic_ms() < end;) {
    (void)client->receive();
    forgotten = forgotten || !client->trouble().empty();
    ASSERT_FALSE(client->refused());
    usleep(10'000);
  }
  EXPECT_TRUE(forgotten);
  EXPECT_TRUE(hears(client.get()));
}

TEST_F(TicketTest, AForeignJobSecretIsNotAdmitted) {
  auto client = enrolling(new_key_pair(), new_key_pair());
  EXPECT_FALSE(hear({client.get()}, 0, [&] { return client->refused(); }));
  EXPECT_TRUE(client->refused());
  EXPECT_TRUE(turned_away(client.get(), "job secret", 0));
  EXPECT_TRUE(admitted_.empty());
}

// As when the clock of a host is wrong until it has asked a time server.
TEST_F(TicketTest, ATicketThatIsRefusedForNowIsPresentedAgain) {
  later_ = unavailable("the clock is 2h00m behind");
  auto client = enrolling(new_key_pair(), join_);
  EXPECT_TRUE(turned_away(client.get(), "2h00m behind", kRefusedMs + 1000));
  EXPECT_FALSE(client->refused());
  later_ = ok_status();
  EXPECT_TRUE(hears(client.get()));
  EXPECT_FALSE(client->refused());
}

// Nobody has to set a clock right for a worker to join.
TEST_F(TicketTest, TheClockOfTheServerIsUsed) {
  for (const double hours : {2, -2}) {
    bound_.reset();
    ahead_s_ = 3600 * hours;
    start();
    auto client = enrolling(new_key_pair(), join_);
    EXPECT_TRUE(hears(client.get())) << hours;
    EXPECT_FALSE(client->refused());
  }
}

// A member that is no job secret, with a copied ticket.
TEST_F(TicketTest, AMemberCannotAdmitOthers) {
  auto client = enrolling(new_key_pair(), member_);
  EXPECT_FALSE(hear({client.get()}, 0, [&] { return client->refused(); }));
  EXPECT_TRUE(client->refused());
  EXPECT_TRUE(turned_away(client.get(), "not a job secret", 0));
}

TEST_F(TicketTest, TicketsAreReadStrictly) {
  const Ticket t{new_key_pair().public_key, "node1", "job", 1234567};
  ASSERT_OK_AND(const auto back, parse_ticket(ticket_text(t)));
  EXPECT_EQ(back.public_key, t.public_key);
  EXPECT_EQ(back.expires, t.expires);
  EXPECT_FALSE(parse_ticket("").ok());
  EXPECT_FALSE(parse_ticket("[[key]]\npublic = \"x\"\n").ok());
  EXPECT_FALSE(parse_ticket(section_text({{"public", t.public_key}})).ok());
  EXPECT_FALSE(parse_ticket(ticket_text(t) + ticket_text(t)).ok());
  const std::string beyond = "99999999999999999999";  // 64 bits
  EXPECT_FALSE(parse_ticket(section_text({{"public", t.public_key},
                                          {"expires", beyond}}))
                   .ok());
}

// ---------------------------------------------------------------- strangers

int tcp_to(const std::string& address) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(
      static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0) abort();
  return fd;
}

// Passes bytes between one client and the server, and keeps what the client
// said.
class Wiretap {
 public:
  explicit Wiretap(const std::string& server) : server_(server) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(at);
    if (bind(listener_, reinterpret_cast<sockaddr*>(&at), size) != 0 ||
        listen(listener_, 1) != 0)
      abort();
    getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &size);
    port_ = ntohs(at.sin_port);
    thread_ = std::thread([this] { pass(); });
  }
  ~Wiretap() {
    stop_ = true;
    thread_.join();
    close(listener_);
  }
  std::string address() const {
    return "tcp://127.0.0.1:" + std::to_string(port_);
  }
  std::string heard() {
    stop_ = true;
    thread_.join();
    thread_ = std::thread([] {});
    return heard_;
  }

 private:
  void pass() {
    pollfd waits{listener_, POLLIN, 0};
    while (!stop_ && poll(&waits, 1, 20) == 0) continue;
    if (stop_) return;
    const int from = accept(listener_, nullptr, nullptr);
    const int to = tcp_to(server_);
    pollfd both[2] = {{from, POLLIN, 0}, {to, POLLIN, 0}};
    char bytes[4096];
    while (!stop_) {
      poll(both, 2, 20);
      for (int i = 0; i < 2; ++i) {
        if ((both[i].revents & POLLIN) == 0) continue;
        const ssize_t n = read(both[i].fd, bytes, sizeof(bytes));
        if (n <= 0) {
          stop_ = true;
          break;
        }
        if (i == 0) heard_.append(bytes, static_cast<size_t>(n));
        (void)!write(both[1 - i].fd, bytes, static_cast<size_t>(n));
      }
    }
    close(from);
    close(to);
  }

  std::string server_;
  int listener_ = -1;
  int port_ = 0;
  std::string heard_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

TEST_F(KeysTest, ReplayedBytesAreRejected) {
  Wiretap tap(bound_->address());
  auto client =
      client_of(tap.address(), ClientKeys{member_, server_.public_key});
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(hears(client.get()));
  client.reset();
  const std::string bytes = tap.heard();
  // What the client sent arrives before the end of its connection is seen.
  const int64_t closed = monotonic_ms();
  while (bound_->take_lost().empty()) {
    ASSERT_LT(monotonic_ms() - closed, kLoadMs);
    usleep(1000);
  }
  drain();
  ASSERT_GT(bytes.size(), 500u);
  EXPECT_LACKS(bytes, "RMSH");  // it is encrypted
  for (const size_t size : {bytes.size(), bytes.size() / 2, size_t{64}}) {
    const int fd = tcp_to(bound_->address());
    (void)!write(fd, bytes.data(), size);
    for (int i = 0; i < 50; ++i) {
      EXPECT_FALSE(bound_->receive());
      usleep(5000);
    }
    close(fd);
  }
}

// Connections that say nothing, nonsense, or have a key of their own.
TEST_F(KeysTest, AFloodOfUnknownKeysDoesNotDisturbAMember) {
  auto client = connect(member_);
  ASSERT_TRUE(hears(client.get()));
  std::vector<std::unique_ptr<Client>> strangers;
  std::vector<int> raw;
  for (int i = 0; i < 20; ++i) strangers.push_back(connect(new_key_pair()));
  for (int i = 0; i < 300; ++i) {
    raw.push_back(tcp_to(bound_->address()));
    if (i % 2 == 0) (void)!write(raw.back(), "GET / HTTP/1.1\r\n\r\n", 18);
  }
  for (int i = 0; i < 50; ++i) {
    for (auto& s : strangers) (void)s->send(report("stranger"));
    const auto r = hear({client.get()});
    ASSERT_TRUE(r);
    ASSERT_EQ(r->key, member_.public_key);
  }
  // Those that say nothing are disconnected.
  char byte = 0;
  while (recv(raw[1], &byte, 1, MSG_DONTWAIT) != 0) {
    char skipped[256];
    (void)!recv(raw[1], skipped, sizeof(skipped), MSG_DONTWAIT);
    usleep(20'000);
  }
  for (const int fd : raw) close(fd);
}

// -------------------------------------------------------------------- files

class KeyFileTest : public ::testing::Test {
 protected:
  std::string path() const { return dir_.path() + "/a.key"; }
  remesh::testing::TempDir dir_;
  const KeyFile key_{"worker", "a", new_key_pair(), new_key_pair().public_key};
};

TEST_F(KeyFileTest, RoundTripsAndIsReadableByItsOwnerOnly) {
  ASSERT_OK(create_key_file(path(), key_));
  struct stat st {};
  ASSERT_EQ(stat(path().c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 07777, 0600u);
  ASSERT_OK_AND(const auto back, read_key_file(path()));
  EXPECT_EQ(back.role, "worker");
  EXPECT_EQ(back.name, "a");
  EXPECT_EQ(back.pair.public_key, key_.pair.public_key);
  EXPECT_EQ(back.pair.secret_key, key_.pair.secret_key);
  EXPECT_EQ(back.server, key_.server);
  EXPECT_EQ(create_key_file(path(), key_).code(), Code::kAlreadyExists);
}

TEST_F(KeyFileTest, AFileThatOthersMayReadIsRefused) {
  ASSERT_OK(create_key_file(path(), key_));
  for (const mode_t mode : {0644, 0604, 0620, 0666}) {
    chmod(path().c_str(), mode);
    const auto read = read_key_file(path());
    ASSERT_FALSE(read.ok()) << mode;
    EXPECT_SAYS(read, "chmod 600");
  }
  chmod(path().c_str(), 0600);
  EXPECT_OK(read_key_file(path()));
  if (geteuid() != 0) return;
  ASSERT_EQ(chown(path().c_str(), 12345, 0), 0);
  EXPECT_SAYS(read_key_file(path()), "uid 12345");
}

TEST_F(KeyFileTest, AnInvalidKeyIsNamed) {
  for (const char* text : {"", "secret", "[[key]]\nsecret = \"short\"\n",
                           "[[key]]\nsecret: 1\n"}) {
    std::ofstream(path()) << text;
    chmod(path().c_str(), 0600);
    const auto read = read_key_file(path());
    ASSERT_FALSE(read.ok()) << text;
    EXPECT_SAYS(read, path());
  }
}

TEST_F(KeyFileTest, PublicKeysAreReadFromWhateverHasOne) {
  const std::string key = key_.pair.public_key;
  EXPECT_EQ(*public_key_of(key), key);
  std::ofstream(path()) << key << "\n";
  EXPECT_EQ(*read_public_key(path()), key);
  std::filesystem::remove(path());
  ASSERT_OK(create_key_file(path(), key_));
  EXPECT_EQ(*read_public_key(path()), key);
  EXPECT_FALSE(read_public_key(path() + ".none").ok());
  // A path of as many characters as a key.
  const std::string folder = std::string(path()).substr(0, path().rfind('/'));
  ASSERT_LT(folder.size(), 39U);
  const std::string like = folder + "/" + std::string(39 - folder.size(), 'k');
  ASSERT_TRUE(valid_key(like));
  EXPECT_FALSE(read_public_key(like).ok());
  std::ofstream(like) << key << "\n";
  EXPECT_EQ(*read_public_key(like), key);
  EXPECT_EQ(*public_key_of(like), key);
}

// A member of the group that shares the run directory may have made RUN/keys,
// and RUN/coordinator.addr leads where it likes.
TEST_F(KeyFileTest, TheServersKeyIsNotOneThatOthersMayReplace) {
  const std::string folder = dir_.path() + "/keys";
  const std::string next = new_key_pair().public_key;
  ASSERT_OK(create_key_file(path(), key_));
  ASSERT_TRUE(std::filesystem::create_directory(folder));
  std::ofstream(folder + "/coordinator.pub") << next << "\n";
  const auto server = [&] {
    const auto keys = choose_keys({.run = dir_.path(), .key = path()});
    return keys.ok() ? (*keys)->server : keys.status().message();
  };
  chmod(folder.c_str(), 0700);
  EXPECT_EQ(server(), next) << "which the key file does not have yet";
  chmod(folder.c_str(), 0770);
  EXPECT_EQ(server(), key_.server);
}

TEST(Sections, RoundTrips) {
  ASSERT_OK_AND(const auto read,
                parse_sections(section_text(
                    {{"a", "say \"no\" \\ \n[[key]]\nb"}, {"b", "2"}})));
  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(read.front().at("a"), "say 'no' ' '[[key]]'b");
  EXPECT_EQ(read.front().at("b"), "2");
}

TEST(Sections, AreASubsetOfToml) {
  ASSERT_OK_AND(
      const auto read,
      parse_sections(
          "# comment\n\n[[key]]\n  a = \"1 = 2\"\nb=\"\"\n[[key]]\n"));
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[0], (Section{{"a", "1 = 2"}, {"b", ""}}));
  for (const char* bad : {"a = \"1\"", "[[key]]\na = 1", "[[key]]\na \"1\" \"",
                          "[[key]]\na x = \"1\"", "[[key]]\n\"", "[key]"})
    EXPECT_FALSE(parse_sections(bad).ok()) << bad;
}

}  // namespace
}  // namespace remesh::wire
