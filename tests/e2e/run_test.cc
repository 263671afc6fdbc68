// `remesh run` from start to end, and the other commands during a run.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "coordinator/ctl/supervisor.h"
#include "proto/base/process.h"
#include "tests/e2e/e2e.h"
#include "tests/testing/expect.h"
#include "tests/testing/leftovers.h"

namespace remesh::e2e {
namespace {

class RunTest : public E2e {};

// h5py opens the newest index and counts the elements of all parameters.
constexpr const char* kReadIndex = R"(
import h5py, sys, math
total = 0
def visit(name, thing):
    global total
    if isinstance(thing, h5py.Dataset):
        values = thing[()]
        total += values.size if values.shape else 0
        assert not values.dtype.kind == 'f' or math.isfinite(values.sum()), name
with h5py.File(sys.argv[1], 'r') as f:
    f.visititems(visit)
print('elements', total)
)";

TEST_F(RunTest, TrainsToTheEndWithOneAndTwoWorkers) {
  for (const int workers : {1, 2}) {
    make({{"train.steps", "40"},
          {"train.peak_flops", "1e12"},
          {"elastic.min_slots", std::to_string(workers)}});
    expect_exit(c().start_run(workers), 0);
    expect_sequence(40);
    const auto metrics = c().metrics();
    ASSERT_FALSE(metrics.empty());
    EXPECT_EQ(metrics.back()["mesh"]["dp"], workers);
    EXPECT_LT(metrics.back()["loss"], metrics.front()["loss"]);
    for (const Json& m : metrics) {
      EXPECT_EQ(m["generation"], 1);
      EXPECT_NEAR(m["mfu"].get<double>() * 1e12 * workers, m["flops_per_s"], 1);
    }
    expect_remesh(0, {"checkpoint", "verify", c().run_dir()});
    const Finished list = c().remesh({"checkpoint", "list", c().run_dir()});
    EXPECT_HAS(list.output, "40");
    EXPECT_EQ(c().events_named("failure").size(), 0U);
  }
}

TEST_F(RunTest, H5pyReadsTheIndexOfACheckpoint) {
  make({{"train.steps", "5"}});
  expect_exit(c().start_run(2), 0);
  const Finished f =
      testing::run_program({"/usr/bin/python3", "-c", kReadIndex,
                            c().checkpoints() + "/step-00000005/index.h5"});
  EXPECT_EQ(f.exit.code, 0) << f.output;
  // Weights and two moments of some 107,000 parameters.
  const size_t at = f.output.find("elements ");
  ASSERT_NE(at, std::string::npos) << f.output;
  EXPECT_GT(std::atol(f.output.c_str() + at + 9), 3 * 90'000);
}

TEST_F(RunTest, DegreesOfDataParallelismAgree) {
  std::vector<std::vector<double>> losses;
  for (const int dp : {1, 2, 3, 5}) {
    make({{"train.steps", "50"}, {"checkpoint.interval", "0"}});
    expect_exit(c().start_run(1, {"--slots-per-worker", std::to_string(dp)}), 0,
                90'000);
    expect_sequence(50);
    losses.emplace_back();
    for (const Json& m : c().metrics()) {
      EXPECT_EQ(m["mesh"]["dp"], dp);
      losses.back().push_back(m["loss"].get<double>());
    }
    ASSERT_EQ(losses.back().size(), 50U);
    for (size_t i = 0; i < 50; ++i)
      EXPECT_NEAR(losses.back()[i], losses[0][i], 1e-5 * std::abs(losses[0][i]))
          << "dp " << dp << ", step " << i + 1;
  }
}

TEST_F(RunTest, CtrlCSavesAndResumeContinuesWithOtherWorkers) {
  const Settings job{{"train.steps", "200"},
                     {"checkpoint.interval", "0"},
                     {"elastic.min_slots", "2"}};
  make(job);
  expect_exit(c().start_run(2), 0);
  const auto whole = raw_losses(c().metric_lines());
  ASSERT_EQ(whole.size(), 200U);

  make(job);
  c().start_run(2);
  ASSERT_TRUE(c().wait_for_step(5));
  interrupt();
  const int64_t stopped_at = c().last_step();
  ASSERT_GE(stopped_at, 5);
  ASSERT_LT(stopped_at, 200);
  // Two workers: bit-identical. Then one and three, with another summation
  // order.
  c().start_run(1, {"--resume", "--set", "elastic.min_slots=1"});
  ASSERT_TRUE(c().wait_for_step(stopped_at + 5));
  interrupt();
  expect_exit(c().start_run(3, {"--resume"}), 0);
  expect_sequence(200);
  expect_no_step_lost();
  const auto pieces = raw_losses(c().metric_lines());
  ASSERT_EQ(pieces.size(), 200U);
  for (int64_t i = 0; i < 200; ++i) {
    const auto at = static_cast<size_t>(i);
    if (i < stopped_at) {
      EXPECT_EQ(pieces[at], whole[at]) << "step " << i + 1;
    }
    EXPECT_NEAR(std::stod(pieces[at]), std::stod(whole[at]), 1e-3);
  }
}

TEST_F(RunTest, StopEndsARunCleanlyAndResumeContinues) {
  make(endless());
  c().start_run(2);
  ASSERT_TRUE(c().wait_for_step(5));
  expect_remesh(0, {"stop", c().run_dir()});
  expect_exit(c().run(), 4);  // a script must not take this for the end
  EXPECT_EQ(c().events_named("job_stopped").size(), 1U);
  const int64_t at = c().last_step();
  expect_sequence(at);
  EXPECT_EQ(c().status()["state"], "stopped") << "from the files of the run";
  expect_exit(c().start_run(1, {"--resume", "--set",
                                fmt::format("train.steps={}", at + 5)}),
              0);
  expect_sequence(at + 5);
}

TEST_F(RunTest, ADetachedRunHasASessionOfItsOwn) {
  make(endless());
  const std::vector<std::string> command = {
      "run", c().job_file(), "--run-dir", c().run_dir(), "--local",
      "1",   "--detach"};
  std::vector<std::string> wrong = command;
  wrong.insert(wrong.end(), {"--bind", "nonsense"});
  const Finished refused = c().remesh(wrong);
  EXPECT_NE(refused.exit.code, 0);
  EXPECT_HAS(refused.output, "is not an address");
  const Finished f = expect_remesh(0, command);
  const size_t at = f.output.find("pid ");
  ASSERT_NE(at, std::string::npos) << f.output;
  const pid_t pid = std::stoi(f.output.substr(at + 4));
  EXPECT_EQ(getsid(pid), pid);
  ASSERT_TRUE(c().wait_for_step(3));
  expect_remesh(0, {"stop", c().run_dir()});
  EXPECT_TRUE(testing::wait_until(
      [&] {
        return testing::read_whole(c().run_dir() + "/logs/run.out")
                   .find("What to try next") != std::string::npos;
      },
      60'000));
  const int64_t stopped_at = c().last_step();
  const Finished again = c().remesh(
      {"resume", c().run_dir(), "--local", "1", "--detach", "--json"}, 60'000);
  ASSERT_EQ(again.exit.code, 0) << again.output;
  const Json j = Json::parse(again.output);
  const auto status = c().status();
  EXPECT_EQ(j["schema"], 1);
  EXPECT_EQ(j["run_dir"], status["run_dir"]);
  EXPECT_EQ(j["address"], status["address"]);
  EXPECT_EQ(j["output"], c().run_dir() + "/logs/run.out");
  EXPECT_EQ(getsid(j["pid"].get<pid_t>()), j["pid"]);
  EXPECT_FALSE(j["needs"].empty());
  for (const Json& need : j["needs"])
    EXPECT_HAS(f.output, need["what"].get<std::string>()) << need;
  ASSERT_TRUE(c().wait_for_step(stopped_at + 1));
  expect_remesh(0, {"stop", c().run_dir()});
  expect_sequence(c().last_step());
}

TEST_F(RunTest, ARunKeepsItsSettingsAndItsFinishedSteps) {
  make({{"train.steps", "5"}, {"checkpoint.interval", "0"}});
  c().start_run(1, {"--set", "train.steps=100000"});
  ASSERT_TRUE(c().wait_for_step(8));
  interrupt();
  const int64_t at = c().last_step();
  // The job file has 5 steps.
  expect_exit(c().start_run(1, {"--resume"}), 2);
  EXPECT_HAS(c().run().output(), fmt::format("has finished step {}", at));
  // A script must not take this for a finished training.
  expect_exit(c().start_run(1, {"--set", "train.steps=100000"}), 4);
  EXPECT_HAS(c().run().output(), "to continue: remesh resume");
  expect_remesh(0, {"resume", c().run_dir(), "--local", "1", "--set",
                    fmt::format("train.steps={}", at + 5)});
  expect_sequence(at + 5);
  EXPECT_EQ(lost_steps(c().events_named("mesh").back()), 0);
  EXPECT_EQ(c().events_named("job_changed").size(), 1U);
}

TEST_F(RunTest, ARunInUseRefusesOtherSettings) {
  make(endless());
  c().start_run(1);
  ASSERT_TRUE(c().wait_for_step(3));
  const Finished f =
      expect_remesh(2, {"run", c().job_file(), "--run-dir", c().run_dir(),
                        "--set", "train.steps=77"});
  EXPECT_HAS(f.output, "-> 77");
  interrupt();
}

TEST_F(RunTest, CheckpointCommandSavesAndPrintsThePath) {
  make(endless({{"checkpoint.interval", "0"}}));
  c().start_run(2);
  ASSERT_TRUE(c().wait_for_step(5));
  const Finished f = expect_remesh(0, {"checkpoint", "save", c().run_dir()});
  const size_t at = f.output.find(c().run_dir());
  ASSERT_NE(at, std::string::npos) << f.output;
  const std::string path = f.output.substr(at, f.output.find('\n', at) - at);
  expect_remesh(0, {"checkpoint", "verify", path});
  // The model is used while it is trained.
  expect_remesh(
      0, {"sample", c().run_dir(), "--prompt", "He said ", "--tokens", "4"});
  expect_remesh(
      0, {"model", "export", c().run_dir(), "--out", c().folder() + "/model"});
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 3));  // training continues
  EXPECT_EQ(c().events_named("mesh").size(), 1U);
  interrupt();
}

// The names in the status, and the files of workers in RUN/logs.
std::set<std::string> worker_names(const Json& status) {
  std::set<std::string> out;
  for (const Json& w : status["workers"])
    if (w["state"] != "dead") out.insert(w["name"]);
  return out;
}

std::set<std::string> worker_files(const std::string& run) {
  std::set<std::string> out;
  for (const auto& f : std::filesystem::directory_iterator(run + "/logs"))
    if (f.path().filename().string().starts_with("worker-"))
      out.insert(f.path().filename());
  return out;
}

TEST_F(RunTest, LocalWorkersKeepTheirNamesAndLogsAcrossResumes) {
  make(endless());
  const std::set<std::string> two = {"local-1", "local-2"};
  // Another run on this host has workers of the same names.
  Cluster other(data_path(), endless());
  other.use_scratch_of(c());
  other.start_run(1);
  ASSERT_TRUE(other.wait_for_step(3));
  for (const char* resume : {"--respawn", "--resume"}) {
    c().start_run(2, {resume});
    ASSERT_TRUE(c().wait_for_step(c().last_step() + 3));
    EXPECT_EQ(worker_names(c().status()), two);
    c().run().kill(SIGKILL);  // its workers die with it
    ASSERT_TRUE(c().run().wait_ms(kEndMs));
  }
  // The states that local-1 and local-2 left are found under their names.
  c().start_run(2, {"--resume"});
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 3));
  expect_no_step_lost();
  // Another terminal adds a worker.
  Process more({{testing::program("remesh"), "run", c().job_file(), "--run-dir",
                 c().run_dir(), "--local", "1"},
                c().folder() + "/more.out",
                c().environment()});
  const std::string third = fmt::format("{}-{}-1", host_name(), more.pid());
  EXPECT_FALSE(c().wait_for_status([&](const Json& s) {
                    return worker_names(s).contains(third);
                  })
                   .is_null());
  more.kill(SIGINT);
  expect_exit(more, 130);
  interrupt();
  EXPECT_EQ(worker_files(c().run_dir()),
            (std::set<std::string>{"worker-local-1.log", "worker-local-2.log",
                                   "worker-" + third + ".log"}));
  other.run().kill(SIGINT);
  expect_exit(other.run(), 130);
}

TEST_F(RunTest, SecondCtrlCKillsAtOnce) {
  make(endless({{"elastic.hang_after_s", "3600"}}));
  c().start_run(2);
  ASSERT_TRUE(c().wait_for_step(3));
  // One rank is stopped, so that the save cannot finish.
  const auto pids = c().rank_pids(2);
  ASSERT_EQ(pids.size(), 2U);
  testing::send_signal(pids.at(1), SIGSTOP);
  c().run().kill(SIGINT);
  c().run().kill(SIGTERM);  // at once: of the same cause, so it does not count
  ASSERT_TRUE(c().wait_for_event("stop_requested"));
  testing::sleep_ms(ctl::Supervisor::kInterruptGapMs + 100);
  EXPECT_TRUE(c().run().running());
  interrupt();
  // The states are still in memory.
  const int64_t last = c().last_step();
  c().start_run(2, {"--resume"});
  ASSERT_TRUE(c().wait_for_step(last + 3));
  interrupt();
  expect_sequence(c().last_step());
  expect_no_step_lost();
}

TEST_F(RunTest, StatusHasHostAndPidOfEveryDaemonAndRank) {
  make(endless());
  c().start_run(2);
  ASSERT_TRUE(c().wait_for_step(3));
  ASSERT_EQ(c().rank_pids(2).size(), 2U);
  const Json s = c().status();
  ASSERT_TRUE(s.is_object());
  const std::string host = host_identity();
  EXPECT_EQ(s["coordinator"]["host"], host);
  std::vector<int> pids = {s["coordinator"]["pid"]};
  for (const Json& w : s["workers"]) {
    EXPECT_EQ(w["host"], host);
    pids.push_back(w["pid"]);
    for (const Json& r : w["ranks"]) {
      EXPECT_EQ(r["host"], host);
      pids.push_back(r["pid"]);
    }
  }
  EXPECT_EQ(pids.size(), 5U);
  for (const int pid : pids)
    EXPECT_NE(testing::process_state(pid), "") << "pid " << pid;
  interrupt();
}

// Whether a connection of that user to loopback is closed without an answer.
bool turned_away(uid_t uid, int port) {
  const pid_t child = fork();
  if (child == 0) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(port));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const timeval limit{.tv_sec = 60, .tv_usec = 0};
    char byte = 0;
    const int fd =
        setresuid(uid, uid, uid) == 0 ? socket(AF_INET, SOCK_STREAM, 0) : -1;
    if (fd < 0 ||
        connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0)
      _exit(2);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    const ssize_t n = recv(fd, &byte, 1, 0);
    _exit(n == 0 || (n < 0 && errno == ECONNRESET) ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST_F(RunTest, RanksOfOneHostAcceptOnlyLocalConnectionsOfTheirUser) {
  make(endless());
  c().start_run(2);
  ASSERT_TRUE(c().wait_for_dp(2));
  int listeners = 0;
  for (const auto& [rank, pid] : c().rank_pids(2))
    for (const std::string& at : testing::listeners_of(pid)) {
      EXPECT_TRUE(at.starts_with("127.0.0.1:") || at.starts_with("[::1]:"))
          << at;
      if (geteuid() != 0 || !at.starts_with("127.")) continue;
      EXPECT_TRUE(turned_away(65534, std::stoi(at.substr(10)))) << at;
      ++listeners;
    }
  EXPECT_TRUE(listeners == 2 || geteuid() != 0);
  EXPECT_TRUE(c().wait_for_step(c().last_step() + 5));
  interrupt();
  EXPECT_EQ(c().events_named("failure").size(), 0U);
}

// A socket in the file system, so that no port is open. What is not such a
// socket is not replaced, and one that is in use is not taken.
TEST_F(RunTest, AUnixSocketReplacesAPort) {
  make(endless());
  const std::string path = c().folder() + "/socket";
  testing::write_whole(path, "a file of the user");
  const std::vector<std::string> run = {"run",       c().job_file(),
                                        "--run-dir", c().run_dir(),
                                        "--bind",    "ipc://" + path};
  const Finished refused = c().remesh(run);
  EXPECT_NE(refused.exit.code, 0);
  EXPECT_HAS(refused.output, "not a socket");
  EXPECT_EQ(testing::read_whole(path), "a file of the user");
  std::filesystem::remove(path);
  c().start_run(2, {"--bind", "ipc://" + path});
  ASSERT_TRUE(c().wait_for_dp(2));
  const Json status = c().status();
  EXPECT_TRUE(testing::listeners_of(status["coordinator"]["pid"]).empty());
  auto second = run;
  second[3] += "2";
  const Finished taken = expect_remesh(75, second);
  EXPECT_HAS(taken.output, "in use");
  interrupt();
}

TEST_F(RunTest, ABadJobFileIsAUsageError) {
  make({{"train.stepz", "5"}});
  expect_exit(c().start_run(1), 2);
  EXPECT_HAS(c().run().output(), "train.steps");
}

}  // namespace
}  // namespace remesh::e2e
