#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>

#include <fstream>
#include <set>

#include "proto/base/process.h"
#include "tests/testing/expect.h"
#include "tests/unit/agent_shell/worker_fixture.h"

namespace remesh::agent {
namespace {

TEST_F(WorkerTest, TwoWorkersGoThroughGenerationsAndLeave) {
  TinyCoordinator c;
  join(c, "a");
  join(c, "b");
  EXPECT_EQ(c.report("a").slots(), 2);
  EXPECT_GT(c.report("a").pid(), 0);
  int64_t worst_start = 0, worst_kill = 0;
  for (int i = 0; i < 4; ++i) {
    const auto a = assignment({"a", "b"}, 2, "step_ms=1");
    worst_start = std::max(worst_start, run_generation(c, a));
    EXPECT_EQ(c.fences(), 2 * generation_) << "modex and end of MPI_Init";
    // The second rank of b dies; its worker reports it and the others are
    // killed.
    const pid_t victim = c.report("b").ranks(1).pid();
    const int64_t start = monotonic_ms();
    testing::send_signal(victim, SIGKILL);
    ASSERT_TRUE(c.run_until([&] {
      const auto& ranks = c.report("b").ranks();
      return ranks.size() == 2 && ranks[1].exited();
    }));
    RecordProperty("killed_to_reported_ms",
                   static_cast<int>(monotonic_ms() - start));
    EXPECT_EQ(c.report("b").ranks(1).signal(), SIGKILL);
    EXPECT_FALSE(c.report("b").ranks(1).killed_by_worker());
    c.want(pb::Directive::ABORT, a);
    ASSERT_TRUE(c.reach({"a", "b"}, pb::Report::QUIESCED, generation_));
    worst_kill = std::max(worst_kill, monotonic_ms() - start);
    EXPECT_TRUE(c.report("b").ranks(0).killed_by_worker());
    EXPECT_TRUE(c.report("a").ranks(0).killed_by_worker());
  }
  std::printf("start -> first step %lld ms, kill -> quiesced %lld ms (worst)\n",
              static_cast<long long>(worst_start),
              static_cast<long long>(worst_kill));
  // Another one that ends normally.
  const auto last = assignment({"a", "b"}, 2, "step_ms=1");
  run_generation(c, last);
  c.want(pb::Directive::FINISH, last);
  ASSERT_TRUE(c.reach({"a", "b"}, pb::Report::QUIESCED, generation_));
  std::set<int64_t> ends;
  for (const char* w : {"a", "b"})
    for (const auto& r : c.report(w).ranks()) {
      EXPECT_EQ(r.exit_code(), 0);
      ends.insert(r.committed_step());
    }
  EXPECT_EQ(ends.size(), 1u);
  c.want(pb::Directive::SHUTDOWN, last);
  EXPECT_TRUE(leaves(c, "a"));
  EXPECT_TRUE(leaves(c, "b"));
  EXPECT_EQ(num_entries(scratch()), 0);
  EXPECT_FALSE(has_shared("a"));
  EXPECT_FALSE(has_shared("b"));
  EXPECT_TRUE(std::filesystem::exists(dir_ / "run/logs/worker-a.log"));
}

TEST_F(WorkerTest, StepsAreReportedSoonAfterTheyAreCommitted) {
  TinyCoordinator c;
  join(c, "a");
  const auto a = assignment({"a"}, 1, "step_ms=40 steps=20");
  run_generation(c, a);
  double worst = 0;
  int64_t seen = 1;
  ASSERT_TRUE(c.run_until([&] {
    const auto& metrics = c.report("a").metrics();
    if (!metrics.empty() && metrics.rbegin()->step() > seen) {
      seen = metrics.rbegin()->step();
      worst = std::max(worst, unix_seconds() - metrics.rbegin()->time());
    }
    return seen == 20;
  }));
  std::printf("step committed -> told %.1f ms (worst)\n", worst * 1e3);
}

TEST_F(WorkerTest, TermDrainsAndASecondTermLeavesAtOnce) {
  TinyCoordinator c;
  join(c, "a");
  const auto a = assignment({"a"}, 2, "step_ms=1");
  run_generation(c, a);
  std::vector<pid_t> ranks;
  for (const auto& r : c.report("a").ranks()) ranks.push_back(r.pid());
  testing::send_signal(pids_["a"], SIGTERM);
  ASSERT_TRUE(c.run_until([&] { return c.report("a").leaving(); }));
  EXPECT_EQ(c.report("a").state(), pb::Report::RUNNING);
  usleep(1'100'000);  // a second one within a second does not count
  EXPECT_EQ(stop("a", SIGTERM), 130);
  for (pid_t r : ranks) EXPECT_FALSE(read_proc_stat(r));
}

TEST_F(WorkerTest, AnImplausibleDirectiveBindsItToNoRun) {
  TinyCoordinator c;
  join(c, "a");
  pb::Assignment bad = assignment({"a"}, 2, "step_ms=1");
  bad.set_run_dir(dir_ / "other\n");
  c.want(pb::Directive::IDLE, bad);
  ASSERT_TRUE(c.run_until([&] {
    return output("a").find("directive_dropped") != std::string::npos;
  })) << output("a");
  run_generation(c, assignment({"a"}, 2, "step_ms=1"));
  EXPECT_TRUE(c.run_until([&] {  // written by a thread
    return std::filesystem::exists(dir_ / "run/logs/worker-a.log");
  }));
  EXPECT_FALSE(std::filesystem::exists(bad.run_dir()));
}

TEST_F(WorkerTest, KilledWorkerTakesItsRanksAndItsSuccessorCleansUp) {
  TinyCoordinator c;
  join(c, "a");
  run_generation(c, assignment({"a"}, 2, "step_ms=1"));
  const uint64_t incarnation = c.report("a").incarnation();
  std::vector<pid_t> ranks;
  for (const auto& r : c.report("a").ranks()) ranks.push_back(r.pid());
  ASSERT_EQ(ranks.size(), 2u);
  stop("a", SIGKILL);
  EXPECT_TRUE(std::filesystem::exists(scratch() + "/a/g1"));
  // In the scratch folder on a host with little shared memory.
  EXPECT_TRUE(has_shared("a") ||
              std::filesystem::exists(scratch() + "/a/g1/shm"));
  c.want(pb::Directive::IDLE, pb::Assignment());
  start(c.address(), "a");
  ASSERT_TRUE(
      c.run_until([&] { return c.report("a").incarnation() != incarnation; }));
  EXPECT_GT(c.report("a").incarnation(), incarnation);
  for (pid_t r : ranks) {
    const auto stat = read_proc_stat(r);  // there is no init to reap it
    EXPECT_TRUE(!stat || stat->state == 'Z');
  }
  EXPECT_FALSE(std::filesystem::exists(scratch() + "/a/g1"));
  EXPECT_FALSE(has_shared("a"));
  EXPECT_TRUE(says("a", "cleaned_up"));
  c.want(pb::Directive::LEAVE, pb::Assignment());
  EXPECT_TRUE(leaves(c, "a"));
}

TEST_F(WorkerTest, RanksTrainOnWithoutTheCoordinatorAndFindANewOne) {
  const std::string address = testing::own_address();
  auto c = std::make_unique<TinyCoordinator>(1, address);
  join(*c, "a");
  const auto a = assignment({"a"}, 2, "step_ms=1");
  run_generation(*c, a);
  const pb::Report before = c->report("a");
  c.reset();
  usleep(500'000);
  const int64_t start = monotonic_ms();
  c = std::make_unique<TinyCoordinator>(2, address);
  ASSERT_TRUE(c->run_until([&] { return c->num_workers() == 1; }));
  std::printf("coordinator back -> worker heard %lld ms\n",
              static_cast<long long>(monotonic_ms() - start));
  c->want(pb::Directive::RUN, a);
  ASSERT_TRUE(
      c->run_until([&] { return c->report("a").coordinator_epoch() == 2; }));
  EXPECT_EQ(c->report("a").state(), pb::Report::RUNNING);
  EXPECT_EQ(c->report("a").ranks(0).pid(), before.ranks(0).pid());
  EXPECT_TRUE(c->run_until([&] {
    return c->report("a").ranks(0).committed_step() >
           before.ranks(0).committed_step() + 50;
  }));
  EXPECT_EQ(c->report("a").incarnation(), before.incarnation());
  c->want(pb::Directive::SHUTDOWN, a);
  EXPECT_TRUE(leaves(*c, "a"));
}

// Opening a FIFO that nobody reads takes for ever, as does a file on a server
// that does not answer.
TEST_F(WorkerTest, StalledStorageDoesNotSilenceAWorker) {
  TinyCoordinator c;
  join(c, "a");
  for (int i = 0; i < 2; ++i) {
    const std::string logs =
        dir_ / ("run/logs/gen-" + std::to_string(generation_ + 1));
    std::filesystem::create_directories(logs);
    for (const char* out : {"/rank-0.out", "/rank-1.out"})
      ASSERT_EQ(mkfifo((logs + out).c_str(), 0600), 0);
    const auto a = assignment({"a"}, 2, "step_ms=1");
    run_generation(c, a);
    testing::send_signal(c.report("a").ranks(1).pid(), SIGKILL);
    ASSERT_TRUE(c.run_until([&] { return c.report("a").ranks(1).exited(); }));
    EXPECT_EQ(c.report("a").ranks(1).signal(), SIGKILL);
    c.want(pb::Directive::ABORT, a);
    ASSERT_TRUE(c.reach({"a"}, pb::Report::QUIESCED, generation_));
  }
  testing::send_signal(pids_["a"], SIGTERM);
  ASSERT_TRUE(c.run_until([&] { return c.report("a").leaving(); }));
  pb::Assignment none;
  none.set_generation(generation_);
  c.want(pb::Directive::LEAVE, none);
  EXPECT_TRUE(leaves(c, "a"));
  EXPECT_EQ(num_entries(scratch()), 0);
}

// A frozen worker loses its connection. When it resumes, it must learn
// immediately that its generation has ended.
TEST_F(WorkerTest, ASuspendedWorkerObeysSoonAfterItContinues) {
  TinyCoordinator c;
  join(c, "a");
  const auto a = assignment({"a"}, 2, "step_ms=1");
  run_generation(c, a);
  testing::send_signal(pids_["a"], SIGSTOP);
  c.run_until([] { return false; }, 4200);
  pb::Assignment next;
  next.set_generation(a.generation() + 1);
  c.want(pb::Directive::IDLE, next);
  c.run_until([] { return false; }, 300);
  const int64_t start = monotonic_ms();
  testing::send_signal(pids_["a"], SIGCONT);
  ASSERT_TRUE(c.reach({"a"}, pb::Report::IDLE, next.generation()));
  std::printf("continues -> obeys %lld ms\n",
              static_cast<long long>(monotonic_ms() - start));
}

// The run directory has the coordinator's address, which may appear later and
// change.
TEST_F(WorkerTest, RunDirectoryIsReadAgainWhenTheCoordinatorMoves) {
  std::filesystem::create_directories(dir_ / "run");
  start(dir_ / "run", "a");
  usleep(200'000);
  for (uint64_t life = 1; life <= 2; ++life) {
    TinyCoordinator c(life);  // a different port each time
    std::ofstream(dir_ / "run/coordinator.addr") << c.address() << "\npid=1\n";
    ASSERT_TRUE(c.run_until([&] { return c.num_workers() == 1; }));
    c.want(pb::Directive::IDLE, pb::Assignment());
    ASSERT_TRUE(
        c.run_until([&] { return c.report("a").coordinator_epoch() == life; }));
  }
  EXPECT_EQ(stop("a", SIGKILL), 128 + SIGKILL);
}

TEST_F(WorkerTest, NamesAreUniqueOnAHost) {
  TinyCoordinator c;
  join(c, "a");
  const pid_t first = pids_["a"];
  start(c.address(), "a");
  EXPECT_EQ(wait("a"), 3);
  EXPECT_TRUE(says("a", "is already running on this host"));
  start(c.address(), "", {"--host-name", "box"});
  ASSERT_TRUE(c.run_until([&] { return c.num_workers() == 2; }));
  EXPECT_EQ(c.report("box").host(), "box");
  pids_["box"] = pids_[""];
  start(c.address(), "", {"--host-name", "box"});
  ASSERT_TRUE(c.run_until([&] { return c.num_workers() == 3; }));
  EXPECT_EQ(c.report("box-2").host(), "box");
  // Workers of two runs have one name if their folders differ.
  TinyCoordinator other;
  start(other.address(), "a", {"--scratch-name", "a-of-other"});
  ASSERT_TRUE(other.run_until([&] { return other.num_workers() == 1; }));
  EXPECT_EQ(stop("a", SIGKILL), 128 + SIGKILL);
  c.want(pb::Directive::LEAVE, pb::Assignment());
  pids_["a"] = first;
  ASSERT_TRUE(c.run_until([&] {
    return read_proc_stat(first)->state == 'Z' &&
           read_proc_stat(pids_[""])->state == 'Z' &&
           read_proc_stat(pids_["box"])->state == 'Z';
  }));
}

template <typename F>
bool eventually(F&& done, int ms = 60'000) {
  for (const int64_t end = monotonic_ms() + ms; monotonic_ms() < end;
       usleep(10'000))
    if (done()) return true;
  return false;
}

TEST_F(WorkerTest, SaysWhyNoCoordinatorAnswers) {
  ASSERT_EQ(mkdir(scratch().c_str(), 0700), 0);
  TinyCoordinator c;
  const std::string& listening = c.address();  // but does not answer
  const std::pair<std::string, std::string> cases[] = {
      // Too long for a name, which no server has to be asked for.
      {"tcp://" + std::string(70, 'x') + ":5710", "cannot be resolved"},
      {"tcp://127.0.0.1:1", "nothing listens on port 1"},
      {listening, "accepts connections but does not answer"}};
  std::vector<std::string> names;
  for (const auto& [address, why] : cases) {
    names.push_back(fmt::format("w{}", names.size()));
    start(address, names.back());
  }
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_TRUE(eventually([&] {
      return output(names[i]).find(cases[i].second) != std::string::npos;
    })) << output(names[i]);
    EXPECT_EQ(stop(names[i], SIGTERM), 0);
  }
}

// A worker that was given an address also finds a coordinator that moved to
// another host, once it knows the run directory. Reading that may hang.
TEST_F(WorkerTest, TheAddressInTheRunDirectoryReplacesASilentOne) {
  const pb::Assignment a = assignment({"a"}, 1, "step_ms=1");
  const std::string address = testing::own_address();
  auto c = std::make_unique<TinyCoordinator>(1, address);
  join(*c, "a");
  run_generation(*c, a);
  c.reset();
  // Reading a pipe into which nobody writes hangs, as a file of a server that
  // is down.
  const std::string file = a.run_dir() + "/coordinator.addr";
  ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
  int pipe = -1;
  ASSERT_TRUE(eventually([&] {
    pipe = open(file.c_str(), O_WRONLY | O_NONBLOCK);
    return pipe >= 0;
  })) << output("a");
  c = std::make_unique<TinyCoordinator>(2, address);
  c->want(pb::Directive::RUN, a);
  ASSERT_TRUE(
      c->run_until([&] { return c->report("a").coordinator_epoch() == 2; }));
  c.reset();
  c = std::make_unique<TinyCoordinator>(3);
  std::filesystem::remove(file);
  std::ofstream(file) << c->address() << "\npid=1\n";
  close(pipe);
  c->want(pb::Directive::RUN, a);
  ASSERT_TRUE(
      c->run_until([&] { return c->report("a").coordinator_epoch() == 3; }));
  EXPECT_EQ(c->report("a").state(), pb::Report::RUNNING);
  c->want(pb::Directive::SHUTDOWN, a);
  EXPECT_TRUE(leaves(*c, "a"));
}

// So does a spare, which has never had an assignment.
TEST_F(WorkerTest, ASpareFindsACoordinatorThatMoved) {
  std::filesystem::create_directories(dir_ / "run");
  pb::Assignment none;
  none.set_run_dir(dir_ / "run");
  TinyCoordinator later(2);
  {
    TinyCoordinator c;
    join(c, "a");
    std::ofstream(dir_ / "run/coordinator.addr")
        << later.address() << "\npid=1\n";
    c.want(pb::Directive::IDLE, none);
    ASSERT_TRUE(
        c.run_until([&] { return c.report("a").coordinator_epoch() == 1; }));
  }
  ASSERT_TRUE(later.run_until([&] { return later.num_workers() == 1; }));
  later.want(pb::Directive::LEAVE, none);
  EXPECT_TRUE(leaves(later, "a"));
}

TEST_F(WorkerTest, ItsConnectionIsAsPatientAsTheCoordinator) {
  TinyCoordinator c;
  c.set_dead_after_ms(20'000);
  start(c.address(), "a");
  ASSERT_TRUE(c.run_until([&] {
    return output("a").find("silence_ms=20000") != std::string::npos;
  })) << output("a");
  const uint64_t seq = c.report("a").seq();
  EXPECT_TRUE(c.run_until([&] { return c.report("a").seq() > seq + 3; }));
  c.want(pb::Directive::LEAVE, pb::Assignment());
  EXPECT_TRUE(leaves(c, "a"));
}

TEST_F(WorkerTest, ANameServerThatDoesNotAnswerDoesNotStopAWorker) {
  const std::string asked = dir_ / "asked", library = dir_ / "library.so";
  std::filesystem::create_directories(dir_ / "run");
  // The list of libraries is separated by spaces.
  std::filesystem::create_symlink(NAME_SERVER_DOWN, library);
  env_ = {"LD_PRELOAD=" + library, "REMESH_TEST_ASKED=" + asked,
          "ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0"};
  start(dir_ / "run", "a");
  ASSERT_TRUE(says("a", "waiting_for_coordinator"));
  std::ofstream(dir_ / "run/coordinator.addr")
      << "tcp://stuck.invalid:5710\npid=1\n";
  ASSERT_TRUE(eventually([&] { return std::filesystem::exists(asked); }))
      << output("a");
  EXPECT_EQ(stop("a", SIGTERM), 0) << output("a");
}

TEST_F(WorkerTest, ARefusalEndsAWorkerThatHasNoJob) {
  ASSERT_EQ(mkdir(scratch().c_str(), 0700), 0);
  const auto server = wire::Server::bind("tcp://127.0.0.1:0", std::nullopt);
  ASSERT_OK(server);
  start((*server)->address(), "a", {"--job", "other"});
  ASSERT_TRUE(eventually([&] {
    const auto m = (*server)->receive();
    if (!m) return false;
    EXPECT_EQ(m->envelope.job(), "other");
    pb::Envelope no;
    no.mutable_refusal()->set_reason("this is job \"mine\"");
    no.mutable_refusal()->set_kind(pb::Refusal::OTHER_JOB);
    return (*server)->send(m->peer, no);
  }));
  EXPECT_EQ(wait("a"), 3);
  EXPECT_HAS(output("a"),
             "this is job \"mine\"; connect to the coordinator of \"other\"");
}

// Another worker has its name: it is taken when that one is gone.
TEST_F(WorkerTest, ATemporaryRefusalKeepsTheWorkerWaiting) {
  ASSERT_EQ(mkdir(scratch().c_str(), 0700), 0);
  const auto server = wire::Server::bind("tcp://127.0.0.1:0", std::nullopt);
  ASSERT_OK(server);
  start((*server)->address(), "a");
  int refusals = 0;
  const auto refused_and_said = [&] {
    const auto m = (*server)->receive();
    if (m && m->envelope.has_report()) {
      pb::Envelope no;
      no.mutable_refusal()->set_reason("a live worker has this name, " +
                                       std::to_string(++refusals));
      no.mutable_refusal()->set_kind(pb::Refusal::RETRY);
      (void)(*server)->send(m->peer, no);
    }
    const std::string log = output("a");
    const size_t said = log.find("no_coordinator");
    return said != std::string::npos &&
           log.find("a live worker has this name", said) != std::string::npos;
  };
  ASSERT_TRUE(eventually(refused_and_said));
  EXPECT_GT(refusals, 1);
  const std::string log = output("a");
  EXPECT_EQ(log.find("refused reason="), log.rfind("refused reason="))
      << "the log has one, however they are worded: " << log;
  testing::send_signal(pids_["a"], SIGTERM);
  EXPECT_EQ(wait("a"), 0);
}

TEST_F(WorkerTest, AnEndedRunEndsAWorker) {
  ASSERT_EQ(mkdir(scratch().c_str(), 0700), 0);
  const std::string run = dir_ / "ended";
  std::filesystem::create_directory(run);
  std::ofstream(run + "/events.jsonl")
      << "{\"time\":1,\"event\":\"coordinator_started\"}\n"
      << "{\"time\":2,\"generation\":1,\"event\":\"job_done\",\"step\":9}\n";
  start(run, "a");
  EXPECT_EQ(wait("a"), 4);
  EXPECT_HAS(output("a"), "remesh resume");
}

TEST_F(WorkerTest, MayStartBeforeTheRunDirectoryExists) {
  TinyCoordinator c;
  const std::string run = dir_ / "later/run";
  start(run, "a");
  ASSERT_TRUE(eventually([&] {
    return output("a").find("waiting_for_coordinator") != std::string::npos;
  }));
  std::filesystem::create_directories(run);
  std::ofstream(run + "/coordinator.addr") << c.address() << "\n";
  EXPECT_TRUE(c.run_until([&] { return c.num_workers() == 1; })) << output("a");
  EXPECT_EQ(stop("a", SIGTERM), 0);
}

TEST_F(WorkerTest, UsageErrorsExitWithTheReason) {
  ASSERT_EQ(mkdir(scratch().c_str(), 0700), 0);
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--slots", "0"}, "--slots"},
      {{"--nonsense"}, "--nonsense"},
      {{"--name", "a/b"}, "a/b"},
  };
  for (const auto& [args, word] : cases) {
    start("tcp://127.0.0.1:1", "", args);
    EXPECT_EQ(wait(""), 2) << word;
    EXPECT_HAS(output(""), word);
  }
  start("nowhere", "x");
  EXPECT_EQ(wait("x"), 2);
  EXPECT_HAS(output("x"), "run directory");
  start("tcp://nowhere", "x");
  EXPECT_EQ(wait("x"), 2);
  EXPECT_HAS(output("x"), "tcp://nowhere");
  start("tcp://127.0.0.1:1", "x", {"--trainer", "/no/trainer"});
  EXPECT_EQ(wait("x"), 5);
}

}  // namespace
}  // namespace remesh::agent
