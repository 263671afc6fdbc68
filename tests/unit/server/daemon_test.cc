// The coordinator daemon as a process: killed, started again, asked.
#include "coordinator/server/daemon.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <optional>

#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/line_file.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "coordinator/server/listen.h"
#include "coordinator/server/scanner.h"
#include "proto/base/clock.h"
#include "proto/wire/channel.h"
#include "proto/wire/key_choice.h"
#include "tests/testing/event_fields.h"
#include "tests/testing/expect.h"
#include "tests/testing/hooked_file_system.h"
#include "tests/testing/resolved_job.h"
#include "tests/testing/small_disk.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/text_message.h"

namespace remesh::server {
namespace {

namespace fs = std::filesystem;

pb::Job test_job(const std::string& seed = "1") {
  return resolved_job({"data.path=/d", "job.name=t", "train.seed=" + seed});
}

// Of a worker for which a generation is planned.
pb::Envelope idle_worker() {
  return text_message<pb::Envelope>(R"(
      report {
        worker: "w" incarnation: 5 seq: 1 host: "h" slots: 1 cores: 1
        state: IDLE has_inventory: true
      })");
}

class DaemonTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (pid_ > 0) stop(SIGKILL);
  }

  void launch() {
    pid_ = fork();
    if (pid_ == 0) {
      auto daemon = Daemon::open(
          {.job = test_job(), .run_dir = run_, .bind = "tcp://127.0.0.1:0"});
      if (!daemon.ok()) _exit(99);
      const int code = (*daemon)->run();
      _exit(code < 0 ? 100 - code : code);
    }
  }

  // Starts a daemon process and waits until it listens.
  void start() {
    launch();
    for (int i = 0; i < 6000; ++i) {
      const auto e = rundir::read_endpoint(run_);
      if (e.ok() && e.value().pid == pid_) {
        endpoint_ = e.value();
        return;
      }
      usleep(10'000);
    }
    FAIL() << "the daemon does not listen";
  }

  // Exit code, or minus the signal.
  int stop(int signal) {
    if (signal != 0) kill(pid_, signal);
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = 0;
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  }

  // Whether another daemon of this run is refused with that code and text.
  bool is_refused(const pb::Job& job, Code code, const std::string& text) {
    const pid_t other = fork();
    if (other == 0) {
      const auto daemon = Daemon::open(
          {.job = job, .run_dir = run_, .bind = "tcp://127.0.0.1:0"});
      _exit(daemon.status().code() == code &&
                    daemon.status().message().find(text) != std::string::npos
                ? 0
                : 1);
    }
    int status = 0;
    waitpid(other, &status, 0);
    return status == 0;
  }

  // Sends until `take` has what it wants of the answers.
  template <typename Take>
  bool talk(const pb::Envelope& envelope, const Take& take) {
    const auto keys = wire::choose_keys(
        {.run = run_,
         .member = envelope.has_command() ? "operator" : "worker"});
    if (!keys.ok()) return false;
    auto client = wire::Client::connect(endpoint_.address, *keys);
    if (!client.ok()) return false;
    const int64_t end = monotonic_ms() + 60000;
    for (int64_t next = 0; monotonic_ms() < end;) {
      if (monotonic_ms() >= next) {
        (void)(*client)->send(envelope);
        next = monotonic_ms() + 300;
      }
      while (auto received = (*client)->receive()) {
        if (take(*received)) return true;
      }
      pollfd fd{(*client)->fd(), POLLIN, 0};
      poll(&fd, 1, 20);
    }
    return false;
  }

  std::optional<pb::Reply> ask(pb::Command::Kind kind,
                               const std::string& job = "") {
    pb::Envelope e;
    e.set_job(job);
    e.mutable_command()->set_id(77);
    e.mutable_command()->set_kind(kind);
    std::optional<pb::Reply> reply;
    talk(e, [&](const pb::Envelope& got) {
      if (!got.has_reply() || got.reply().id() != 77) return false;
      reply = got.reply();
      return true;
    });
    return reply;
  }

  const TempDir dir_;
  const std::string run_ = dir_ / "run";
  int pid_ = 0;
  rundir::Endpoint endpoint_;
};

TEST_F(DaemonTest, AKilledDaemonReturnsAtTheSamePortWithALargerEpoch) {
  start();
  const auto before = ask(pb::Command::STATUS);
  ASSERT_TRUE(before.has_value());
  EXPECT_EQ(before->status().coordinator_pid(), pid_);
  EXPECT_EQ(before->status().state(), pb::JobStatus::WAITING);
  // Another program may take the port meanwhile.
  std::string address;
  for (int tries = 0; tries < 5 && endpoint_.address != address; ++tries) {
    address = endpoint_.address;
    EXPECT_EQ(stop(SIGKILL), -SIGKILL);
    start();
  }
  EXPECT_EQ(endpoint_.address, address);
  const auto after = ask(pb::Command::STATUS);
  ASSERT_TRUE(after.has_value());
  EXPECT_GT(after->status().epoch(), before->status().epoch());
}

TEST_F(DaemonTest, ASecondDaemonIsRefused) {
  start();
  EXPECT_TRUE(is_refused(test_job(), Code::kAlreadyExists, ""));
  EXPECT_TRUE(ask(pb::Command::STATUS).has_value()) << "the first continues";
}

TEST_F(DaemonTest, AnotherTrainingInTheRunDirectoryIsRefused) {
  start();
  stop(SIGKILL);
  EXPECT_TRUE(is_refused(test_job("2"), Code::kInvalidArgument, "train.seed"));
}

TEST_F(DaemonTest, TermEndsTheDaemonAndStopEndsTheJob) {
  start();
  EXPECT_EQ(stop(SIGTERM), 100 + SIGTERM);
  EXPECT_OK(rundir::read_endpoint(run_)) << "kept for the next life";
  start();
  ASSERT_TRUE(ask(pb::Command::STOP).has_value());
  EXPECT_EQ(stop(0), 0);
  EXPECT_FALSE(rundir::read_endpoint(run_).ok()) << "the job is over";
  const auto events = rundir::read_lines(rundir::events_path(run_));
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(rundir::parse_event_line(events.back()).value().event(),
            "job_stopped");
}

TEST_F(DaemonTest, MessagesOfAnotherJobAreRefused) {
  start();
  const auto reply = ask(pb::Command::STOP, "other");
  ASSERT_TRUE(reply.has_value());
  EXPECT_FALSE(reply->ok());
  EXPECT_HAS(reply->error(), "\"t\"");
  talk(text_message<pb::Envelope>(
           "job: 'other' report { worker: 'w' incarnation: 1 seq: 1 }"),
       [](const pb::Envelope&) { return true; });
  EXPECT_EQ(ask(pb::Command::STATUS, "t")->status().workers_size(), 0);
}

TEST_F(DaemonTest, AWorkerGetsDirectivesAndIsShown) {
  start();
  int64_t generation = -1;
  EXPECT_TRUE(talk(idle_worker(), [&](const pb::Envelope& got) {
    if (!got.has_directive()) return false;
    EXPECT_EQ(got.directive().worker(), "w");
    EXPECT_EQ(got.job(), "t");
    generation = got.directive().generation();
    return got.directive().goal() == pb::Directive::PREPARE;
  }));
  EXPECT_EQ(generation, 1);
  const auto lines = rundir::read_lines(rundir::events_path(run_));
  bool mesh = false;
  for (const auto& line : lines) {
    mesh |= rundir::parse_event_line(line).value().event() == "mesh";
  }
  EXPECT_TRUE(mesh) << "written before the directive was sent";
}

// The daemon hears workers, says what is wrong, and writes when there is room.
TEST_F(DaemonTest, WaitsForAFullDisk) {
  const remesh::testing::SmallDisk disk(run_, 4 << 20);
  if (!disk.mounted()) GTEST_SKIP() << "needs mount";
  start();
  ASSERT_TRUE(ask(pb::Command::STATUS).has_value());
  disk.fill(0);
  pb::Envelope envelope = idle_worker();
  ASSERT_OK_AND(const auto keys,
                wire::choose_keys({.run = run_, .member = "worker"}));
  ASSERT_OK_AND(auto client, wire::Client::connect(endpoint_.address, keys));
  pb::JobStatus status;
  for (int i = 0; i < 200 && status.problems_size() == 0; ++i) {
    // Each is an event; the last block of the file takes some of them.
    envelope.mutable_report()->set_worker("w" + std::to_string(i));
    (void)client->send(envelope);
    usleep(20'000);
    if (const auto reply = ask(pb::Command::STATUS)) status = reply->status();
  }
  ASSERT_EQ(status.problems_size(), 1);
  EXPECT_HAS(status.problems(0).text(), run_ + "/");
  EXPECT_GE(status.problems(0).seconds(), 1);
  EXPECT_GT(status.workers_size(), 1) << "they are heard";
  // One that is started meanwhile listens at the same address.
  EXPECT_EQ(stop(SIGKILL), -SIGKILL);
  launch();
  const auto reply = ask(pb::Command::STATUS);
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->status().coordinator_pid(), pid_);
  disk.free();
  const auto restarted = [&] {
    const auto lines = rundir::read_lines(rundir::events_path(run_));
    return std::any_of(lines.begin(), lines.end(), [](const auto& line) {
      return rundir::parse_event_line(line)->event() == "coordinator_restarted";
    });
  };
  for (int i = 0; i < 6000 && !restarted(); ++i) usleep(10'000);
  EXPECT_TRUE(restarted());
  EXPECT_EQ(stop(SIGTERM), 100 + SIGTERM);
}

TEST_F(DaemonTest, ATornLineOfMetricsIsCutAndTheLastStepIsKnown) {
  start();
  stop(SIGKILL);
  std::ofstream(rundir::metrics_path(run_))
      << rundir::metrics_line(
             text_message<pb::StepMetrics>("step: 41 loss: 1.5"))
      << "\n{\"step\":42,\"lo";
  start();
  EXPECT_EQ(ask(pb::Command::STATUS)->status().step(), 41);
}

TEST(ListenTest, AdvertisedAddresses) {
  const auto a = [](const char* bound, const char* advertise,
                    const char* host) {
    const auto out = advertised_address(bound, advertise, host);
    return out.ok() ? *out : out.status().message();
  };
  EXPECT_EQ(a("tcp://127.0.0.1:99", "", "me"), "tcp://127.0.0.1:99");
  EXPECT_EQ(a("tcp://0.0.0.0:99", "", "me"), "tcp://me:99");
  EXPECT_EQ(a("tcp://0.0.0.0:99", "head", "me"), "tcp://head:99");
  EXPECT_EQ(a("tcp://0.0.0.0:99", "head:7", "me"), "tcp://head:7");
  EXPECT_EQ(a("tcp://0.0.0.0:99", "tcp://head:7", "me"), "tcp://head:7");
  EXPECT_EQ(a("tcp://[::]:99", "", "me"), "tcp://me:99");
  for (const char* host : {"fd00::1", "[fd00::1]", "tcp://fd00::1"})
    EXPECT_EQ(a("tcp://[::]:99", host, "me"), "tcp://[fd00::1]:99") << host;
  EXPECT_EQ(a("tcp://[::]:99", "[fd00::1]:7", "me"), "tcp://[fd00::1]:7");
  EXPECT_EQ(a("tcp://[::]:99", "fd00:0:0:0:0:0:0:1", "me"),
            "tcp://[fd00:0:0:0:0:0:0:1]:99");
  // The last group may be the port that is meant, or there is no other reading
  // that makes sense.
  for (const char* bad : {"fd00::1:5710", "fd00:0:0:0:0:0:0:1:5710",
                          "head:", "head:99999", "a:b:c", "[fd00::1"})
    EXPECT_HAS(a("tcp://[::]:99", bad, "me"), "in brackets: [fd00::1]") << bad;
  EXPECT_OK(check_addresses("tcp://[::]:0", "fd00::1"));
  EXPECT_FALSE(check_addresses("tcp://[::]:0", "fd00::1:5710").ok());
  EXPECT_FALSE(check_addresses("tcp://fd00::1:5710", "").ok());
  EXPECT_OK(check_addresses("ipc:///tmp/socket", ""));
}

TEST(ListenTest, LoopbackIsKnown) {
  for (const char* bind : {"tcp://127.0.0.1:0", "tcp://localhost:5",
                           "tcp://[::1]:5", "tcp://lo:0"})
    EXPECT_TRUE(is_loopback(bind)) << bind;
  for (const char* bind : {"tcp://0.0.0.0:0", "tcp://*:5", "tcp://[::]:5",
                           "tcp://10.0.0.1:0", "tcp://eth0:0", "nonsense"})
    EXPECT_FALSE(is_loopback(bind)) << bind;
}

TEST(ListenTest, BadAddressesNameWhatIsAllowed) {
  for (const char* bad : {"", "foo", "tcp://", "tcp://h", "tcp://h:", "h:1",
                          "tcp://h:x", "tcp://h:65536", "udp://h:1"}) {
    const auto parsed = wire::parse_address(bad);
    ASSERT_FALSE(parsed.ok()) << bad;
    EXPECT_SAYS(parsed, "tcp://HOST:PORT");
  }
}

TEST(ListenTest, ATakenFormerPortIsReplacedAndARequestedOneFails) {
  auto first = listen("tcp://127.0.0.1:0", "", std::nullopt, 0, [](int) {});
  ASSERT_OK(first);
  const std::string taken = (*first)->address();
  auto other =
      listen("tcp://127.0.0.1:0", taken, std::nullopt, 100, [](int) {});
  ASSERT_OK(other);
  EXPECT_NE((*other)->address(), taken);
  int slept = 0;
  const auto wished =
      listen(taken, "", std::nullopt, 200, [&](int ms) { slept += ms; });
  EXPECT_FALSE(wished.ok());
  EXPECT_EQ(slept, 200);
}

// coordinator.addr may be damaged.
TEST(ListenTest, AFormerAddressThatIsNoneIsReplaced) {
  for (const char* former : {"tcp://127.0", "tcp://127.0.0.1:", "x"})
    EXPECT_TRUE(
        listen("tcp://127.0.0.1:0", former, std::nullopt, 0, [](int) {}).ok())
        << former;
}

TEST(ScannerTest, StalledStorageIsNamedAndDelaysNothing) {
  const TempDir dir;
  fs::create_directory(dir / "step-00000002");
  std::promise<void> answer;
  const auto answers = answer.get_future().share();
  auto scanner = std::make_unique<Scanner>(
      dir.path(), /*run_id=*/0,
      std::make_unique<HookedFileSystem>(
          [answers](const std::string& call, const std::string&) {
            if (call == "open") answers.wait();
            return ok_status();
          }));
  EXPECT_FALSE(scanner->problem().has_value());
  scanner->request(0);
  while (!scanner->problem()) usleep(10'000);
  EXPECT_EQ(scanner->problem()->text(),
            dir.path() + ": the storage does not answer");
  EXPECT_FALSE(scanner->take().has_value());
  scanner.reset();
  answer.set_value();  // lets the thread end
}

TEST(ScannerTest, ADamagedManifestIsNamedOnce) {
  const TempDir dir;
  const std::string path = dir / "step-00000002";
  fs::create_directory(path);
  std::ofstream(path + "/manifest.json") << "{";
  ASSERT_OK_AND(const auto scan,
                scan_checkpoints(*posix_file_system(), dir.path(), 0, 0));
  ASSERT_EQ(scan.invalid.size(), 1u);
  EXPECT_EQ(scan.invalid[0].path, path);
  EXPECT_EQ(scan.invalid[0].code, Code::kCorrupt);
  const std::string& text = scan.invalid[0].why;
  EXPECT_EQ(text.find(path), 0u) << text;
  EXPECT_EQ(text.find(path, 1), std::string::npos) << text;
}

TEST(ScannerTest, AFolderThatCannotBeListedGivesNoAnswer) {
  const TempDir dir;
  const std::string folder = dir.write("checkpoints", "a file");
  Scanner scanner(folder, /*run_id=*/0);
  scanner.request(0);
  const auto wait = [&](int ms) {
    pollfd fd{scanner.fd(), POLLIN, 0};
    poll(&fd, 1, ms);
  };
  wait(60'000);
  EXPECT_FALSE(scanner.take().has_value());
  const auto note = scanner.take_error();
  ASSERT_TRUE(note.has_value());
  EXPECT_EQ(note->event(), "scan_failed");
  EXPECT_EQ(undeclared_fields(*note), "");
  EXPECT_HAS(note->cause(), folder);
  // Once it can be, there is one.
  fs::remove(folder);
  std::optional<core::CheckpointsScanned> scan;
  for (int i = 0; i < 600 && !scan; ++i) {
    wait(100);
    scan = scanner.take();
  }
  ASSERT_TRUE(scan.has_value());
  EXPECT_TRUE(scan->valid.empty());
}

TEST(ScannerTest, AFailureWithAnotherTextIsNotAnnouncedAgain) {
  const TempDir dir;
  int lists = 0;  // of the scanner's thread
  Scanner scanner(dir.path(), /*run_id=*/0,
                  std::make_unique<HookedFileSystem>(
                      [&](const std::string& call, const std::string&) {
                        if (call != "list") return ok_status();
                        return unavailable("list " + std::to_string(++lists));
                      }));
  std::vector<std::string> causes;
  for (int scan = 0; scan < 3; ++scan) {
    scanner.request(0);
    pollfd fd{scanner.fd(), POLLIN, 0};
    ASSERT_EQ(poll(&fd, 1, 60'000), 1);
    EXPECT_FALSE(scanner.take().has_value());
    if (const auto e = scanner.take_error()) causes.push_back(e->cause());
  }
  EXPECT_EQ(causes, std::vector<std::string>{"list 1"});
}

}  // namespace
}  // namespace remesh::server
