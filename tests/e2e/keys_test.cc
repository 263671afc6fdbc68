// Nobody takes part without a key, and keys change without disturbing a job.
#include "proto/wire/keys.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "proto/wire/channel.h"
#include "tests/e2e/e2e.h"
#include "tests/testing/expect.h"

namespace remesh::e2e {
namespace {

class KeysTest : public E2e {
 protected:
  std::string address() {
    std::ifstream in(c().run_dir() + "/coordinator.addr");
    std::string line;
    std::getline(in, line);
    return line;
  }
  std::string key(const std::string& name) {
    return c().run_dir() + "/keys/" + name + ".key";
  }
  void kill_and_restart_coordinator() {
    kill_coordinator();
    c().start_coordinator();
  }
  std::string log_of(const std::string& worker) {
    return testing::read_whole(c().run_dir() + "/logs/worker-" + worker +
                               ".log");
  }
  // In what they have written since their logs had these sizes.
  void expect_in_logs_of_workers(const std::string& text,
                                 std::map<std::string, size_t> since = {}) {
    for (const char* worker : {"w1", "w2"})
      EXPECT_TRUE(testing::wait_until(
          [&] {
            return log_of(worker).find(text, since[worker]) !=
                   std::string::npos;
          },
          kEndMs))
          << worker;
  }
  // Steps that finish from now on, without another generation.
  void expect_undisturbed(int64_t generation, int64_t steps = 5) {
    EXPECT_TRUE(c().wait_for_step(c().last_step() + steps)) << c().describe();
    EXPECT_EQ(c().metrics().back()["generation"], generation) << c().describe();
    EXPECT_TRUE(c().events_named("worker_lost").empty()) << c().describe();
  }
};

TEST_F(KeysTest, ARunRefusesUsersWhoCannotReadItsKeys) {
  make(endless());
  c().start_run(2);
  ASSERT_TRUE(c().wait_for_step(3)) << c().describe();
  struct stat st {};
  ASSERT_EQ(stat((c().run_dir() + "/keys").c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0700u);
  const std::string at = address();
  const Json seen = c().status();
  ASSERT_FALSE(seen.is_null());
  EXPECT_EQ(seen["no_auth"], false);
  // Without a key.
  Finished f = expect_remesh(2, {"stop", at, "--no-auth"});
  EXPECT_HAS(f.output, "demands a key");
  f = expect_remesh(2, {"stop", at});
  EXPECT_HAS(f.output, "remesh key new");
  // With a key that is not allowed, one of the wrong role, and one revoked.
  expect_remesh(0, {"key", "new", "viewer", "anna", c().run_dir()});
  expect_remesh(0, {"status", at, "--key", key("anna")});
  f = expect_remesh(2, {"stop", at, "--key", key("anna")});
  EXPECT_HAS(f.output, "role viewer");
  expect_remesh(2, {"stop", at, "--key", key("worker")});
  const std::string copy = c().folder() + "/copy.key";
  const std::string server = c().run_dir() + "/keys/coordinator.pub";
  expect_remesh(0, {"key", "new", "operator", "x", "--out", copy});
  f = expect_remesh(2, {"stop", at, "--key", copy, "--server-key", server});
  EXPECT_HAS(f.output, "does not allow this key");
  // A worker whose key is not allowed leaves.
  c().start_worker({.name = "stranger",
                    .more = {"--key", copy, "--server-key", server},
                    .connect = at});
  expect_exit(c().worker("stranger"), 3);
  EXPECT_TRUE(c().events_named("stop_requested").empty());
  expect_remesh(0, {"stop", at, "--key", key("operator")});
  expect_exit(c().run(), 4);
}

// As from another host, which does not see the run directory.
TEST_F(KeysTest, AnAddressAndAKeyAreEnoughToChangeAndStopARun) {
  make(endless());
  const std::vector<std::string> elsewhere = {
      "unshare",
      "-m",
      "sh",
      "-c",
      "mount -t tmpfs tmpfs \"$0\" && exec \"$@\"",
      c().run_dir()};
  std::filesystem::create_directory(c().run_dir());
  auto probe = elsewhere;
  probe.emplace_back("true");
  if (testing::run_program(probe).exit.code != 0) GTEST_SKIP() << "needs mount";
  c().start_run(2);
  ASSERT_TRUE(c().wait_for_step(3)) << c().describe();
  const std::string keys = c().folder() + "/keys";
  std::filesystem::copy(c().run_dir() + "/keys", keys);
  const std::string at = address();
  c().run_commands_with(elsewhere);
  const std::vector<std::string> with_keys = {
      at, "--key", keys + "/operator.key", "--server-key",
      keys + "/coordinator.pub"};
  const auto remesh = [&](std::vector<std::string> args) {
    args.insert(args.end(), with_keys.begin(), with_keys.end());
    return expect_remesh(0, args).output;
  };
  EXPECT_EQ(remesh({"scale", "1", "--wait"}), "training on dp1\n");
  // It learns of the end although it does nothing between the request and that.
  auto argv = elsewhere;
  argv.insert(argv.end(), {testing::program("remesh"), "stop"});
  argv.insert(argv.end(), with_keys.begin(), with_keys.end());
  testing::Process stop({.argv = argv, .output = c().folder() + "/stop.out"});
  ASSERT_TRUE(c().wait_for_event("stop_requested")) << c().describe();
  stop.kill(SIGSTOP);
  expect_exit(c().run(), 4);
  stop.kill(SIGCONT);
  ASSERT_TRUE(stop.wait_ms(kEndMs));
  EXPECT_EQ(stop.exit().code, 0);
  EXPECT_TRUE(stop.output().starts_with("the job is stopped at step "))
      << stop.output();
}

TEST_F(KeysTest, MembersSurviveNewKeysOnBothSides) {
  make(endless());
  start_services(2);
  const int64_t generation = c().metrics().back()["generation"];
  expect_remesh(0, {"key", "rotate", "coordinator", c().run_dir()});
  testing::sleep_ms(1000);
  kill_and_restart_coordinator();
  expect_undisturbed(generation);
  expect_remesh(0, {"key", "rotate", "worker", c().run_dir()});
  const auto own = wire::read_public_key(key("worker"));
  ASSERT_TRUE(own.ok()) << own.status().message();
  expect_in_logs_of_workers(*own);
  expect_undisturbed(generation);
  expect_remesh(0, {"key", "revoke", "worker-old", c().run_dir()});
  expect_undisturbed(generation, 10);
  stop_in_order();
}

TEST_F(KeysTest, AWorkerWhoseKeyIsRevokedIsDroppedAtOnce) {
  make(endless({{"elastic.dead_after_ms", "60000"}}));
  start_services(1);
  expect_remesh(0, {"key", "new", "worker", "second", c().run_dir()});
  c().start_worker({.name = "w2", .more = {"--key", key("second")}});
  ASSERT_TRUE(c().wait_for_dp(2)) << c().describe();
  // Its name is its own.
  c().start_worker(
      {.name = "thief", .more = {"--name", "w2", "--scratch-name", "thief"}});
  ASSERT_TRUE(c().wait_for_event("worker_refused")) << c().describe();
  EXPECT_EQ(c().events_named("worker_refused")[0]["worker"], "w2");
  EXPECT_TRUE(c().events_named("worker_lost").empty()) << c().describe();
  expect_exit(c().worker("thief"), 3);
  expect_remesh(0, {"key", "revoke", "second", c().run_dir()});
  ASSERT_TRUE(c().wait_for_event("worker_lost")) << c().describe();
  EXPECT_HAS(std::string(c().events_named("worker_lost")[0]["cause"]),
             "not allowed");
  ASSERT_TRUE(c().wait_for_dp(1, c().last_step())) << c().describe();
  EXPECT_EQ(c().status()["workers"].size(), 1u);
  // The second one counts a second after the first.
  EXPECT_TRUE(testing::wait_until(
      [&] {
        c().worker("w2").kill(SIGTERM);
        return c().worker("w2").wait_ms(1100);
      },
      kEndMs));
  expect_remesh(0, {"stop", c().run_dir()});
  expect_exit(c().coordinator(), 0);
  expect_exit(c().worker("w1"), 0);
}

// Whoever listens at the address of a coordinator that is gone can refuse all
// workers: libzmq does not authenticate that.
TEST_F(KeysTest, AStrangerAtTheCoordinatorsAddressSendsNobodyAway) {
  make(endless());
  start_services(2);
  const int64_t generation = c().metrics().back()["generation"];
  const auto own = wire::read_key_file(key("coordinator"));
  ASSERT_TRUE(own.ok()) << own.status().message();
  const std::string at = address();
  c().coordinator().kill(SIGKILL);
  ASSERT_TRUE(c().coordinator().wait_ms(kEndMs));
  {
    const auto stranger =
        wire::Server::bind(at, wire::ServerKeys{.own = own->pair});
    ASSERT_TRUE(stranger.ok()) << stranger.status().message();
    expect_in_logs_of_workers("refused reason=");
  }
  c().start_coordinator();
  expect_undisturbed(generation);
  stop_in_order();
}

TEST_F(KeysTest, AJobSecretAdmitsWorkers) {
  make(endless());
  c().start_coordinator();
  expect_remesh(0, {"key", "new", "join", "batch", c().run_dir(), "--workers",
                    "w*", "--days", "1"});
  const std::string secret = key("batch");
  for (const char* name : {"w1", "w2"})
    c().start_worker(
        {.name = name, .more = {"--secret", secret}, .connect = address()});
  ASSERT_TRUE(c().wait_for_dp(2)) << c().describe();
  const int64_t generation = c().metrics().back()["generation"];
  kill_and_restart_coordinator();
  expect_undisturbed(generation);
  // Workers present the next secret before the former one is revoked.
  const std::map<std::string, size_t> since = {{"w1", log_of("w1").size()},
                                               {"w2", log_of("w2").size()}};
  expect_remesh(0, {"key", "rotate", "batch", c().run_dir()});
  expect_in_logs_of_workers("connection_replaced", since);
  expect_remesh(0, {"key", "revoke", "batch-old", c().run_dir()});
  expect_undisturbed(generation);
  // A name that the secret does not admit, and the secret of another job.
  c().start_worker(
      {.name = "other", .more = {"--secret", secret}, .connect = address()});
  expect_exit(c().worker("other"), 3);
  const std::string foreign = c().folder() + "/foreign.key";
  expect_remesh(0, {"key", "new", "join", "x", "--out", foreign});
  c().start_worker({.name = "w3",
                    .more = {"--secret", foreign, "--server-key",
                             c().run_dir() + "/keys/coordinator.pub"},
                    .connect = address()});
  expect_exit(c().worker("w3"), 3);
  // A worker that died is replaced under its name with the same secret.
  c().worker("w2").kill(SIGKILL);
  ASSERT_TRUE(c().wait_for_event("worker_lost")) << c().describe();
  c().start_worker(
      {.name = "w2", .more = {"--secret", secret}, .connect = address()});
  EXPECT_TRUE(c().wait_for_dp(2, c().last_step())) << c().describe();
  stop_in_order();
}

// More of them than the coordinator may have files open.
TEST_F(KeysTest, AFloodOfUnknownClientsDoesNotDisturbTheJob) {
  make(endless());
  c().start_coordinator({}, {"prlimit", "--nofile=300:300"});
  for (const char* name : {"w1", "w2"}) c().start_worker({.name = name});
  ASSERT_TRUE(c().wait_for_dp(2)) << c().describe();
  const int64_t generation = c().metrics().back()["generation"];
  sockaddr_in to{};
  to.sin_family = AF_INET;
  const std::string at = address();
  to.sin_port =
      htons(static_cast<uint16_t>(std::stoi(at.substr(at.rfind(':') + 1))));
  inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
  std::vector<int> strangers;
  for (int i = 0; i < 600; ++i) {
    const int fd =
        socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    ASSERT_GE(fd, 0) << "after " << i;
    (void)!connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to));
    strangers.push_back(fd);
  }
  for (size_t i = 0; i < strangers.size(); i += 2)
    (void)!send(strangers[i], "nonsense, and more of it", 24, MSG_NOSIGNAL);
  EXPECT_FALSE(c().status().is_null());
  expect_undisturbed(generation);
  kill_coordinator(SIGTERM);
  for (const int fd : strangers) close(fd);
  c().start_coordinator();
  expect_undisturbed(generation);
  stop_in_order();
}

TEST_F(KeysTest, NoAuthMustBeGivenOnBothSides) {
  make(endless());
  c().start_coordinator({"--bind", "tcp://0.0.0.0:0"});
  expect_exit(c().coordinator(), 5);
  EXPECT_HAS(c().coordinator().output(), "remesh key new coordinator");
  c().start_coordinator({"--no-auth"});
  c().start_worker({.name = "w0"});
  expect_exit(c().worker("w0"), 2);
  EXPECT_HAS(c().worker("w0").output(), "--no-auth");
  c().start_worker({.name = "w1", .more = {"--no-auth"}});
  ASSERT_TRUE(c().wait_for_step(3)) << c().describe();
  EXPECT_EQ(c().status()["no_auth"], true);
  stop_in_order();
}

}  // namespace
}  // namespace remesh::e2e
