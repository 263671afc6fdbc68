#include "worker/agent/shell/launcher.h"

#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "proto/base/child.h"
#include "proto/base/clock.h"
#include "proto/base/process.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "tests/testing/leftovers.h"
#include "tests/testing/process.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/agent_shell/num_entries.h"
#include "worker/agent/shell/process_control.h"

namespace {
std::atomic<bool> g_exec_hangs{false};
thread_local int64_t g_waited_ms = 0;  // in poll(), without an event
}  // namespace

// These are called instead of the C library's (ELF symbol interposition).
extern "C" int execve(const char* path, char* const argv[],
                      char* const envp[]) noexcept {
  while (g_exec_hangs) pause();
  return static_cast<int>(syscall(SYS_execve, path, argv, envp));
}
extern "C" int poll(pollfd* fds, nfds_t count, int timeout_ms) {
  static const auto real =
      reinterpret_cast<decltype(&poll)>(dlsym(RTLD_NEXT, "poll"));
  const int ready = real(fds, count, timeout_ms);
  if (ready == 0) g_waited_ms += timeout_ms;
  return ready;
}

namespace remesh::agent {
namespace {

// A launcher with the ranks of one worker. The "coordinator" returns the blob
// of each fence immediately.
class LauncherTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    world_ = std::make_unique<World>();
    std::filesystem::create_directory(world_->dir / "run");
    ASSERT_OK_AND(world_->scratch, Scratch::open(world_->dir.path(), "w.0-a"));
    LauncherOptions o;
    o.worker = "w.0-a";
    o.trainer = world_->dir / "trainer";
    std::filesystem::copy_file(TEST_RANK, o.trainer);
    o.cores = 2;
    // If PMIx deadlocks, do as a worker does: run all tests again in a new
    // process.
    o.restart = [] {
      world_->scratch.reset();
      std::filesystem::remove_all(world_->dir.path());
      ADD_FAILURE() << restart_process().to_string();
    };
    ASSERT_OK_AND(
        world_->launcher,
        Launcher::make(o, world_->scratch.get(), &world_->loop,
                       [](Event e) { world_->on_event(std::move(e)); }));
    world_->loop.on_tick([] { world_->launcher->beat(monotonic_ms()); });
  }
  static void TearDownTestSuite() {
    world_->launcher.reset();
    const std::string folder = world_->scratch->folder();
    world_->scratch.reset();
    EXPECT_FALSE(std::filesystem::exists(folder));
    world_.reset();
  }
  void SetUp() override {
    ASSERT_TRUE(world_ && world_->launcher);
    world_->answer_fences = true;
    world_->events.clear();
  }
  void TearDown() override { clean_up(); }

  struct World {
    TempDir dir;
    wire::Loop loop{10};
    std::unique_ptr<Scratch> scratch;
    std::unique_ptr<Launcher> launcher;
    std::vector<Event> events;
    int64_t generation = 0;
    bool answer_fences = true;
    std::function<bool()> until;

    void on_event(Event e) {
      if (const auto* f = std::get_if<LocalFence>(&e);
          f != nullptr && answer_fences)
        launcher->complete_fence(f->generation, f->index, f->blob);
      events.push_back(std::move(e));
    }
  };

  static pb::Assignment assignment(int ranks, const std::string& script) {
    pb::Assignment a;
    a.set_generation(++world_->generation);
    a.mutable_mesh()->set_dp(ranks);
    a.add_workers("w.0-a");
    a.add_hosts("here");
    a.set_run_dir(world_->dir / "run");
    a.mutable_job()->mutable_job()->set_name("test");
    a.mutable_job()->mutable_job()->set_description(script);
    for (int r = 0; r < ranks; ++r) {
      auto* p = a.add_ranks();
      p->set_rank(r);
      p->set_worker("w.0-a");
      p->set_threads(1);
    }
    return a;
  }

  template <typename E>
  static std::vector<E> seen() {
    std::vector<E> out;
    for (const Event& e : world_->events)
      if (const E* x = std::get_if<E>(&e)) out.push_back(*x);
    return out;
  }

  static bool run_until(const std::function<bool()>& done, int ms = 120000) {
    const int64_t end = monotonic_ms() + ms;
    world_->loop.on_tick([&] {
      world_->launcher->beat(monotonic_ms());
      if (done() || monotonic_ms() > end) world_->loop.stop(0);
    });
    world_->loop.run();
    return done();
  }
  static bool run_until_exits(size_t n, int ms = 120000) {
    return run_until([n] { return seen<RankExited>().size() >= n; }, ms);
  }
  static int64_t committed(int rank) {
    for (const RankSample& s : world_->launcher->samples())
      if (s.status.rank() == rank) return s.status.committed_step();
    return -1;
  }
  static void clean_up() {
    Launcher& l = *world_->launcher;
    if (l.idle()) return;
    l.kill(world_->generation);
    EXPECT_TRUE(run_until([&l] { return !l.running(); }));
    l.tear_down(world_->generation);
    EXPECT_EQ(num_entries(world_->scratch->folder()), 2);  // lock, pmix
  }

  static std::unique_ptr<World> world_;
};
std::unique_ptr<LauncherTest::World> LauncherTest::world_;

TEST_F(LauncherTest, RanksFormOneWorldAndEnd) {
  world_->launcher->spawn(assignment(3, "steps=5"));
  EXPECT_EQ(seen<RankStarted>().size(), 3u);
  EXPECT_TRUE(seen<SpawnFailed>().empty());
  ASSERT_TRUE(run_until_exits(3));
  std::vector<pb::StepMetrics> steps;
  for (const RankExited& e : seen<RankExited>()) {
    EXPECT_EQ(e.exit_code, 0) << e.rank << ": " << e.last_log;
    EXPECT_EQ(e.signal, 0);
    EXPECT_EQ(e.sample.status.committed_step(), 5);
    EXPECT_EQ(e.sample.status.phase(), pb::RankStatus::ENDED);
    for (const auto& m : e.sample.steps) steps.push_back(m);
  }
  ASSERT_EQ(steps.size(), 5u);
  EXPECT_EQ(steps[4].step(), 5);
  EXPECT_EQ(steps[4].loss(), 6.0);  // 1 + 2 + 3
  EXPECT_EQ(steps[4].generation(), world_->generation);
  EXPECT_EQ(steps[4].mesh().dp(), 3);
  EXPECT_FALSE(steps[4].has_val_loss());
  // PMIx completes the fences among ranks of one worker itself.
  EXPECT_TRUE(seen<LocalFence>().empty());
  world_->launcher->tear_down(world_->generation);
  EXPECT_EQ(seen<TornDown>().size(), 1u);
  EXPECT_TRUE(std::filesystem::exists(world_->dir / "run/logs/gen-" +
                                      std::to_string(world_->generation) +
                                      "/rank-2.log"));
}

// An upgrade while the worker runs.
TEST_F(LauncherTest, RanksRunTheProgramThatWasThereAtTheStart) {
  const std::filesystem::path trainer = world_->dir / "trainer",
                              old = world_->dir / "old";
  std::filesystem::rename(trainer, old);
  std::ofstream(trainer) << "#!/bin/sh\nexit 9\n";
  std::filesystem::permissions(trainer, std::filesystem::perms::owner_all);
  world_->launcher->spawn(assignment(2, "steps=2"));
  ASSERT_TRUE(run_until_exits(2));
  for (const RankExited& e : seen<RankExited>()) EXPECT_EQ(e.exit_code, 0);
  world_->launcher->tear_down(world_->generation);
  std::filesystem::rename(old, trainer);
}

TEST_F(LauncherTest, StopRequestEndsAllRanksAtTheSameStep) {
  world_->launcher->spawn(assignment(2, "step_ms=1"));
  ASSERT_TRUE(run_until([] { return committed(0) > 3; }));
  world_->launcher->set_request(kRequestStop, 0);
  ASSERT_TRUE(run_until_exits(2));
  const auto e = seen<RankExited>();
  EXPECT_EQ(e[0].exit_code, 0);
  EXPECT_EQ(e[1].exit_code, 0);
  EXPECT_EQ(e[0].sample.status.committed_step(),
            e[1].sample.status.committed_step());
}

TEST_F(LauncherTest, RanksOfOneWorkerListenNowhere) {
  world_->launcher->spawn(assignment(2, "step_ms=1"));
  ASSERT_TRUE(run_until([] { return committed(1) > 2; }));
  for (const auto& s : seen<RankStarted>())
    EXPECT_EQ(testing::listeners_of(s.pid), std::vector<std::string>{});
}

TEST_F(LauncherTest, PmixRefusesAnotherUser) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  world_->launcher->spawn(assignment(2, "step_ms=1"));
  ASSERT_TRUE(run_until([] { return committed(0) > 2; }));
  std::vector<std::pair<std::string, std::string>> env;
  std::istringstream in(testing::read_whole(
      "/proc/" + std::to_string(seen<RankStarted>()[0].pid) + "/environ"));
  for (std::string entry; std::getline(in, entry, '\0');)
    if (entry.starts_with("PMIX_"))
      env.emplace_back(entry.substr(0, entry.find('=')),
                       entry.substr(entry.find('=') + 1));
  const auto as = [&](const std::string& uid) {
    return testing::run_program({PMIX_INTRUDER, uid}, 20'000, env);
  };
  const testing::Finished stranger = as("65534");
  EXPECT_EQ(stranger.exit.code, 1) << stranger.output;
  const testing::Finished friendly = as("0");
  EXPECT_EQ(friendly.exit.code, 0) << friendly.output;
}

TEST_F(LauncherTest, AKilledRankIsReportedAtOnceAndTheOthersEndQuickly) {
  world_->launcher->spawn(assignment(3, "step_ms=1"));
  ASSERT_TRUE(run_until([] { return committed(2) > 2; }));
  const pid_t victim = seen<RankStarted>()[1].pid;
  const int64_t start = monotonic_ms();
  testing::send_signal(victim, SIGKILL);
  ASSERT_TRUE(run_until_exits(1));
  RecordProperty("kill_to_reported_ms",
                 static_cast<int>(monotonic_ms() - start));
  EXPECT_EQ(seen<RankExited>()[0].signal, SIGKILL);
  EXPECT_EQ(seen<RankExited>()[0].rank, 1);
  world_->launcher->kill(world_->generation);
  ASSERT_TRUE(run_until_exits(3));
  world_->launcher->tear_down(world_->generation);
  RecordProperty("kill_to_torn_down_ms",
                 static_cast<int>(monotonic_ms() - start));
  EXPECT_EQ(seen<TornDown>().size(), 1u);
  for (const auto& s : seen<RankStarted>())
    EXPECT_FALSE(read_proc_stat(s.pid)) << s.pid;
}

TEST_F(LauncherTest, AStoppedRankIsShownAsStoppedAndDies) {
  world_->launcher->spawn(assignment(2, "step_ms=1"));
  ASSERT_TRUE(run_until([] { return committed(0) > 2; }));
  testing::send_signal(seen<RankStarted>()[0].pid, SIGSTOP);
  ASSERT_TRUE(run_until(
      [] { return world_->launcher->samples()[0].status.os_state() == "T"; }));
  EXPECT_GT(world_->launcher->samples()[1].status.rss_bytes(), 1u << 20);
}

TEST_F(LauncherTest, ExitCodeAndLastLogLineAreKept) {
  world_->launcher->spawn(assignment(2, "exit=1@3:65"));
  ASSERT_TRUE(run_until_exits(1));
  const RankExited e = seen<RankExited>()[0];
  EXPECT_EQ(e.rank, 1);
  EXPECT_EQ(e.exit_code, 65);
  EXPECT_EQ(e.last_log, "rank 1 leaves as told");
}

// Its program is not the trainer, or does not wait for it.
TEST_F(LauncherTest, ARankThatEndsWithoutAnErrorBeforeItMayHasFailed) {
  world_->launcher->spawn(assignment(2, "exit=1@3:0"));
  ASSERT_TRUE(run_until_exits(1));
  const RankExited e = seen<RankExited>()[0];
  EXPECT_EQ(e.rank, 1);
  EXPECT_EQ(e.exit_code, 1);
  EXPECT_HAS(e.sample.status.error(), "exit code 0");
}

TEST_F(LauncherTest, AbortShowsAsTheExitOfTheRank) {
  world_->launcher->spawn(assignment(2, "abort=0@2"));
  ASSERT_TRUE(run_until_exits(1));
  const RankExited e = seen<RankExited>()[0];
  EXPECT_EQ(e.rank, 0);
  EXPECT_TRUE(e.exit_code != 0 || e.signal != 0);
}

// Ranks that hang in MPI_Init because those of another worker never start.
TEST_F(LauncherTest, UnansweredFenceDoesNotHinderTheNextGeneration) {
  world_->answer_fences = false;
  pb::Assignment a = assignment(3, "steps=1");
  a.add_workers("other");
  a.add_hosts("here");
  a.mutable_ranks(2)->set_worker("other");
  world_->launcher->spawn(a);
  ASSERT_TRUE(run_until([] { return !seen<LocalFence>().empty(); }));
  const LocalFence modex = seen<LocalFence>()[0];
  EXPECT_EQ(modex.generation, world_->generation);
  EXPECT_EQ(modex.index, 0);
  EXPECT_FALSE(modex.blob.empty());
  clean_up();
  world_->events.clear();
  world_->launcher->spawn(assignment(2, "steps=1"));
  ASSERT_TRUE(run_until_exits(2));
  for (const RankExited& e : seen<RankExited>()) EXPECT_EQ(e.exit_code, 0);
}

TEST_F(LauncherTest, ARankKilledBeforeItConnectsToPmixIsReported) {
  world_->launcher->spawn(assignment(2, "steps=1"));
  world_->launcher->kill(world_->generation);
  ASSERT_TRUE(run_until_exits(2));
  for (const RankExited& e : seen<RankExited>()) EXPECT_EQ(e.signal, SIGKILL);
}

TEST_F(LauncherTest, AnInvalidAssignmentFailsToSpawn) {
  pb::Assignment a = assignment(2, "");
  a.mutable_ranks(1)->set_worker("stranger");
  world_->launcher->spawn(a);
  ASSERT_EQ(seen<SpawnFailed>().size(), 1u);
  EXPECT_HAS(seen<SpawnFailed>()[0].error, "stranger");
}

// The storage of the run directory may be read-only, stale or not mounted here.
TEST_F(LauncherTest, RanksThatCannotLogToTheRunDirectoryTrain) {
  const std::string gone = world_->dir / "gone";
  for (const std::string& run : {gone, std::string("/proc/nowhere")}) {
    world_->events.clear();
    pb::Assignment a = assignment(2, "exit=1@3:65");
    a.set_run_dir(run);
    world_->launcher->spawn(a);
    EXPECT_EQ(seen<RankStarted>().size(), 2u);
    EXPECT_TRUE(seen<SpawnFailed>().empty());
    ASSERT_TRUE(run_until_exits(1));
    const RankExited e = seen<RankExited>()[0];
    EXPECT_EQ(e.exit_code, 65);
    EXPECT_EQ(e.last_log, "rank 1 leaves as told") << "from a local file";
    EXPECT_FALSE(std::filesystem::exists(run)) << "it is not made again";
    clean_up();
  }
}

// The file system that has the trainer may hang. Ranks are started on the
// thread that reports to the coordinator.
TEST_F(LauncherTest, ProgramsThatDoNotBeginAreWaitedForOnceInAll) {
  g_waited_ms = 0;
  g_exec_hangs = true;
  world_->launcher->spawn(assignment(4, "steps=1"));
  g_exec_hangs = false;  // not for those that hang
  EXPECT_GT(g_waited_ms, 0);
  EXPECT_LE(g_waited_ms, ChildOptions().patience_ms);
  EXPECT_EQ(seen<RankStarted>().size(), 4u);
  clean_up();
  world_->events.clear();
  world_->launcher->spawn(assignment(2, "steps=1"));
  ASSERT_TRUE(run_until_exits(2));
  for (const RankExited& e : seen<RankExited>()) EXPECT_EQ(e.exit_code, 0);
}

TEST_F(LauncherTest, ManyGenerationsLeaveNothingBehind) {
  int fds = 0;
  [[maybe_unused]] uint64_t rss = 0;
  const int64_t start = monotonic_ms();
  for (int i = 0; i < 55; ++i) {
    world_->events.clear();
    // Some exit normally, some are killed at any point.
    world_->launcher->spawn(assignment(1 + i % 2, "steps=1"));
    if (i % 3 == 0) {
      clean_up();
    } else {
      ASSERT_TRUE(run_until_exits(1 + i % 2));
      for (const RankExited& e : seen<RankExited>())
        ASSERT_EQ(e.exit_code, 0) << i << ": " << e.last_log;
      world_->launcher->tear_down(world_->generation);
    }
    if (i == 4) {
      fds = num_open_fds();
      rss = read_proc_stat(getpid())->rss_bytes;
    }
  }
  RecordProperty("ms_a_generation",
                 static_cast<int>((monotonic_ms() - start) / 55));
  // The storage thread and PMIx close their last descriptors a little later.
  EXPECT_TRUE(run_until([&] { return num_open_fds() <= fds; }))
      << num_open_fds() << " descriptors, " << fds << " after 5 generations";
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(read_proc_stat(getpid())->rss_bytes, rss + (4 << 20));
#endif
  EXPECT_EQ(num_entries(world_->scratch->folder()), 2);  // lock, pmix
  EXPECT_TRUE(
      run_until([] { return num_entries(world_->dir / "run/logs") <= 20; }));
}

}  // namespace
}  // namespace remesh::agent
