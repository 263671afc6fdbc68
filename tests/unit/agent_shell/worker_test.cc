// Real remesh-worker processes against a coordinator of a few lines, over
// ZeroMQ, with MPI ranks that train nothing.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include <fstream>
#include <map>
#include <set>

#include "proto/base/clock.h"
#include "proto/wire/channel.h"
#include "tests/unit/agent_shell/temp_dir.h"
#include "worker/agent/shell/process.h"
#include "worker/agent/shell/scratch.h"

namespace remesh::agent {
namespace {

// Tells workers what to be, and relays fences. Decides nothing.
class TinyCoordinator {
 public:
  explicit TinyCoordinator(uint64_t epoch = 1,
                           const std::string& at = "tcp://127.0.0.1:0")
      : epoch_(epoch), server_(std::move(wire::Server::bind(at)).value()) {}

  const std::string& address() const { return server_->address(); }
  pb::Report& report(const std::string& worker) { return reports_[worker]; }
  size_t num_workers() const { return reports_.size(); }
  int fences() const { return num_fences_; }

  // What every worker is told from now on.
  void want(pb::Directive::Goal goal, const pb::Assignment& assignment) {
    goal_ = goal;
    assignment_ = assignment;
    tell_all();
  }

  // Runs until `done`; false when that takes longer than `ms`.
  template <typename F>
  bool run_until(F&& done, int ms = 20000) {
    const int64_t end = monotonic_ms() + ms;
    while (!done()) {
      if (monotonic_ms() > end) return false;
      pollfd p{server_->fd(), POLLIN, 0};
      poll(&p, 1, 20);
      while (auto m = server_->receive()) on(*m);
      if (monotonic_ms() - told_ms_ > 50) tell_all();
    }
    return true;
  }
  // Until all of them are in that state of the generation.
  bool reach(const std::set<std::string>& workers, pb::Report::State state,
             int64_t generation, int ms = 20000) {
    return run_until(
        [&] {
          for (const std::string& w : workers)
            if (reports_[w].state() != state ||
                reports_[w].generation() != generation)
              return false;
          return true;
        },
        ms);
  }

 private:
  void on(const wire::Received& m) {
    if (m.envelope.has_report()) {
      const pb::Report& r = m.envelope.report();
      peers_[r.worker()] = m.peer;
      reports_[r.worker()] = r;
    } else if (m.envelope.has_fence_in()) {
      on_fence(m.envelope.fence_in());
    }
  }
  void on_fence(const pb::FenceIn& f) {
    auto& blobs = fences_[{f.generation(), f.index()}];
    blobs[f.worker()] = f.blob();
    std::set<std::string> with_ranks;
    for (const auto& r : assignment_.ranks()) with_ranks.insert(r.worker());
    if (blobs.size() != with_ranks.size()) return;
    ++num_fences_;
    pb::Envelope e;
    auto* out = e.mutable_fence_out();
    out->set_epoch(epoch_);
    out->set_generation(f.generation());
    out->set_index(f.index());
    for (const auto& [worker, blob] : blobs) out->mutable_blob()->append(blob);
    for (const auto& w : with_ranks) server_->send(peers_[w], e);
  }
  void tell_all() {
    told_ms_ = monotonic_ms();
    for (const auto& [worker, r] : reports_) {
      pb::Envelope e;
      e.set_job("test");
      auto* d = e.mutable_directive();
      d->set_epoch(epoch_);
      d->set_seq(++seq_);
      d->set_worker(worker);
      d->set_incarnation(r.incarnation());
      d->set_generation(assignment_.generation());
      d->set_goal(goal_);
      *d->mutable_assignment() = assignment_;
      d->set_report_every_ms(50);
      d->set_job("test");
      server_->send(peers_[worker], e);
    }
  }

  uint64_t epoch_;
  std::unique_ptr<wire::Server> server_;
  uint64_t seq_ = 0;
  int64_t told_ms_ = 0;
  int num_fences_ = 0;
  pb::Directive::Goal goal_ = pb::Directive::IDLE;
  pb::Assignment assignment_;
  std::map<std::string, wire::PeerId> peers_;
  std::map<std::string, pb::Report> reports_;
  std::map<std::pair<int64_t, int64_t>, std::map<std::string, std::string>>
      fences_;
};

class WorkerTest : public ::testing::Test {
 protected:
  void TearDown() override {
    for (auto& [name, pid] : pids_) stop(name, SIGKILL);
    // Workers that a test killed leave their things to the next one.
    (void)Scratch::open(scratch(), "sweeper");
    EXPECT_EQ(num_entries(scratch()), 0);
  }
  bool has_shared(const std::string& name) const {
    return std::filesystem::exists(shared_root_of(scratch() + "/" + name));
  }
  std::string scratch() const { return dir_ / "scratch"; }

  pid_t start(const std::string& connect, const std::string& name,
              std::vector<std::string> more = {}) {
    ChildOptions c;
    c.argv = {REMESH_WORKER, "--connect", connect,     "--slots", "2",
              "--trainer",   TEST_RANK,   "--scratch", scratch()};
    if (!name.empty()) c.argv.insert(c.argv.end(), {"--name", name});
    c.argv.insert(c.argv.end(), more.begin(), more.end());
    c.env = {"PATH=/usr/bin:/bin", "OMPI_MCA_btl=nonsense",
             "PMIX_RANK=77"};  // must not reach the ranks
    for (const char* key : {"ASAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS"})
      if (const char* v = getenv(key))
        c.env.push_back(std::string(key) + "=" + v);
    c.output = dir_ / ("worker-" + name + ".out");
    auto child = start_child(c);
    EXPECT_TRUE(child.ok());
    close(child->pidfd);
    return pids_[name] = child->pid;
  }
  // Its exit code, 128 + signal; -1: it did not end.
  int wait(const std::string& name, int ms = 10000) {
    const int64_t end = monotonic_ms() + ms;
    int status = 0;
    while (waitpid(pids_[name], &status, WNOHANG) == 0) {
      if (monotonic_ms() > end) return -1;
      usleep(2000);
    }
    pids_[name] = 0;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  int stop(const std::string& name, int signal) {
    if (pids_[name] == 0) return -1;
    kill(pids_[name], signal);
    return wait(name);
  }
  std::string output(const std::string& name) const {
    std::ifstream in(dir_ / ("worker-" + name + ".out"));
    return {std::istreambuf_iterator<char>(in), {}};
  }

  pb::Assignment assignment(const std::vector<std::string>& workers,
                            int ranks_each, const std::string& script) {
    pb::Assignment a;
    a.set_generation(++generation_);
    a.set_run_dir(dir_ / "run");
    a.mutable_job()->mutable_job()->set_name("test");
    a.mutable_job()->mutable_job()->set_description(script);
    int rank = 0;
    for (const std::string& w : workers) {
      a.add_workers(w);
      a.add_hosts("here");
      for (int i = 0; i < ranks_each; ++i) {
        auto* p = a.add_ranks();
        p->set_rank(rank++);
        p->set_worker(w);
        p->set_threads(1);
      }
    }
    a.mutable_mesh()->set_dp(rank);
    return a;
  }
  // Prepares and runs; returns the milliseconds until a step was committed
  // everywhere.
  int64_t run_generation(TinyCoordinator& c, const pb::Assignment& a) {
    const std::set<std::string> w(a.workers().begin(), a.workers().end());
    c.want(pb::Directive::PREPARE, a);
    EXPECT_TRUE(c.reach(w, pb::Report::PREPARED, a.generation()));
    const int64_t start = monotonic_ms();
    c.want(pb::Directive::RUN, a);
    EXPECT_TRUE(c.run_until([&] {
      for (const std::string& name : w) {
        if (c.report(name).ranks_size() == 0) return false;
        for (const auto& r : c.report(name).ranks())
          if (r.committed_step() < 1) return false;
      }
      return true;
    })) << output("a");
    return monotonic_ms() - start;
  }

  TempDir dir_;
  int64_t generation_ = 0;
  std::map<std::string, pid_t> pids_;
};

TEST_F(WorkerTest, TwoWorkersGoThroughGenerationsAndLeave) {
  TinyCoordinator c;
  start(c.address(), "a");
  start(c.address(), "b");
  ASSERT_TRUE(c.run_until([&] { return c.num_workers() == 2; }));
  EXPECT_EQ(c.report("a").slots(), 2);
  EXPECT_GT(c.report("a").pid(), 0);
  int64_t worst_start = 0, worst_kill = 0;
  for (int i = 0; i < 4; ++i) {
    const auto a = assignment({"a", "b"}, 2, "step_ms=1");
    worst_start = std::max(worst_start, run_generation(c, a));
    EXPECT_EQ(c.fences(), 2 * generation_) << "modex and end of MPI_Init";
    // The second rank of b dies; its worker tells, the others are killed.
    const pid_t victim = c.report("b").ranks(1).pid();
    const int64_t start = monotonic_ms();
    kill(victim, SIGKILL);
    ASSERT_TRUE(c.run_until([&] {
      const auto& ranks = c.report("b").ranks();
      return ranks.size() == 2 && ranks[1].exited();
    }));
    EXPECT_LT(monotonic_ms() - start, 200);
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
  EXPECT_LT(worst_kill, 1000);
  // One more that ends in order.
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
  ASSERT_TRUE(c.run_until([&] {
    return read_proc_stat(pids_["a"])->state == 'Z' &&
           read_proc_stat(pids_["b"])->state == 'Z';
  }));
  EXPECT_EQ(wait("a"), 0);
  EXPECT_EQ(wait("b"), 0);
  EXPECT_EQ(num_entries(scratch()), 0);
  EXPECT_FALSE(has_shared("a"));
  EXPECT_FALSE(has_shared("b"));
  EXPECT_TRUE(std::filesystem::exists(dir_ / "run/logs/worker-a.log"));
}

TEST_F(WorkerTest, StepsAreToldSoonAfterTheyAreCommitted) {
  TinyCoordinator c;
  start(c.address(), "a");
  ASSERT_TRUE(c.run_until([&] { return c.num_workers() == 1; }));
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
  EXPECT_LT(worst, 0.25);
}

TEST_F(WorkerTest, TermLeavesAndASecondOneAtOnce) {
  TinyCoordinator c;
  start(c.address(), "a");
  ASSERT_TRUE(c.run_until([&] { return c.num_workers() == 1; }));
  const auto a = assignment({"a"}, 2, "step_ms=1");
  run_generation(c, a);
  std::vector<pid_t> ranks;
  for (const auto& r : c.report("a").ranks()) ranks.push_back(r.pid());
  kill(pids_["a"], SIGTERM);
  ASSERT_TRUE(c.run_until([&] { return c.report("a").leaving(); }));
  EXPECT_EQ(c.report("a").state(), pb::Report::RUNNING);
  EXPECT_EQ(stop("a", SIGTERM), 130);
  for (pid_t r : ranks) EXPECT_FALSE(read_proc_stat(r));
}

TEST_F(WorkerTest, KilledWorkerTakesItsRanksAndItsSuccessorCleansUp) {
  TinyCoordinator c;
  start(c.address(), "a");
  ASSERT_TRUE(c.run_until([&] { return c.num_workers() == 1; }));
  run_generation(c, assignment({"a"}, 2, "step_ms=1"));
  const uint64_t incarnation = c.report("a").incarnation();
  std::vector<pid_t> ranks;
  for (const auto& r : c.report("a").ranks()) ranks.push_back(r.pid());
  ASSERT_EQ(ranks.size(), 2u);
  stop("a", SIGKILL);
  EXPECT_TRUE(std::filesystem::exists(scratch() + "/a/g1"));
  EXPECT_TRUE(has_shared("a"));
  c.want(pb::Directive::IDLE, pb::Assignment());
  start(c.address(), "a");
  ASSERT_TRUE(
      c.run_until([&] { return c.report("a").incarnation() != incarnation; }));
  EXPECT_GT(c.report("a").incarnation(), incarnation);
  for (pid_t r : ranks) {
    const auto stat = read_proc_stat(r);  // nobody reaps it here: no init
    EXPECT_TRUE(!stat || stat->state == 'Z');
  }
  EXPECT_FALSE(std::filesystem::exists(scratch() + "/a/g1"));
  EXPECT_FALSE(has_shared("a"));
  EXPECT_NE(output("a").find("cleaned_up"), std::string::npos);
  c.want(pb::Directive::LEAVE, pb::Assignment());
  ASSERT_TRUE(
      c.run_until([&] { return read_proc_stat(pids_["a"])->state == 'Z'; }));
  EXPECT_EQ(wait("a"), 0);
}

TEST_F(WorkerTest, RanksGoOnWithoutTheCoordinatorAndANewOneIsFound) {
  auto c = std::make_unique<TinyCoordinator>(1);
  const std::string address = c->address();
  start(address, "a");
  ASSERT_TRUE(c->run_until([&] { return c->num_workers() == 1; }));
  const auto a = assignment({"a"}, 2, "step_ms=1");
  run_generation(*c, a);
  const pb::Report before = c->report("a");
  c.reset();
  usleep(500'000);
  const int64_t start = monotonic_ms();
  c = std::make_unique<TinyCoordinator>(2, address);
  ASSERT_TRUE(c->run_until([&] { return c->num_workers() == 1; }));
  EXPECT_LT(monotonic_ms() - start, 600);
  std::printf("coordinator back -> worker heard %lld ms\n",
              static_cast<long long>(monotonic_ms() - start));
  c->want(pb::Directive::RUN, a);
  ASSERT_TRUE(
      c->run_until([&] { return c->report("a").coordinator_epoch() == 2; }));
  EXPECT_EQ(c->report("a").state(), pb::Report::RUNNING);
  EXPECT_EQ(c->report("a").ranks(0).pid(), before.ranks(0).pid());
  EXPECT_GT(c->report("a").ranks(0).committed_step(),
            before.ranks(0).committed_step() + 50);
  EXPECT_EQ(c->report("a").incarnation(), before.incarnation());
  c->want(pb::Directive::SHUTDOWN, a);
  ASSERT_TRUE(
      c->run_until([&] { return read_proc_stat(pids_["a"])->state == 'Z'; }));
  EXPECT_EQ(wait("a"), 0);
}

// A frozen worker loses its connection to heartbeats. When it goes on, it must
// hear at once that its generation is over.
TEST_F(WorkerTest, FrozenWorkerObeysSoonAfterItGoesOn) {
  TinyCoordinator c;
  start(c.address(), "a");
  ASSERT_TRUE(c.run_until([&] { return c.num_workers() == 1; }));
  const auto a = assignment({"a"}, 2, "step_ms=1");
  run_generation(c, a);
  kill(pids_["a"], SIGSTOP);
  c.run_until([] { return false; }, 4200);
  pb::Assignment next;
  next.set_generation(a.generation() + 1);
  c.want(pb::Directive::IDLE, next);
  c.run_until([] { return false; }, 300);
  const int64_t start = monotonic_ms();
  kill(pids_["a"], SIGCONT);
  ASSERT_TRUE(c.reach({"a"}, pb::Report::IDLE, next.generation()));
  std::printf("goes on -> obeys %lld ms\n",
              static_cast<long long>(monotonic_ms() - start));
  EXPECT_LT(monotonic_ms() - start, 1000);
}

// The run directory names the coordinator; it may come later and move.
TEST_F(WorkerTest, RunDirectoryIsReadAgainWhenTheCoordinatorMoves) {
  std::filesystem::create_directories(dir_ / "run");
  start(dir_ / "run", "a");
  usleep(200'000);
  for (uint64_t life = 1; life <= 2; ++life) {
    TinyCoordinator c(life);  // another port each time
    std::ofstream(dir_ / "run/coordinator.addr") << c.address() << "\npid=1\n";
    ASSERT_TRUE(c.run_until([&] { return c.num_workers() == 1; }, 8000));
    c.want(pb::Directive::IDLE, pb::Assignment());
    ASSERT_TRUE(
        c.run_until([&] { return c.report("a").coordinator_epoch() == life; }));
  }
  EXPECT_EQ(stop("a", SIGKILL), 128 + SIGKILL);
}

TEST_F(WorkerTest, NamesAreUniqueOnAHost) {
  TinyCoordinator c;
  start(c.address(), "a");
  ASSERT_TRUE(c.run_until([&] { return c.num_workers() == 1; }));
  const pid_t first = pids_["a"];
  start(c.address(), "a");
  EXPECT_EQ(wait("a"), 3);
  EXPECT_NE(output("a").find("runs already on this host"), std::string::npos);
  start(c.address(), "", {"--host-name", "box"});
  ASSERT_TRUE(c.run_until([&] { return c.num_workers() == 2; }));
  EXPECT_EQ(c.report("box").host(), "box");
  pids_["box"] = pids_[""];
  start(c.address(), "", {"--host-name", "box"});
  ASSERT_TRUE(c.run_until([&] { return c.num_workers() == 3; }));
  EXPECT_EQ(c.report("box-2").host(), "box");
  c.want(pb::Directive::LEAVE, pb::Assignment());
  pids_["a"] = first;
  ASSERT_TRUE(c.run_until([&] {
    return read_proc_stat(first)->state == 'Z' &&
           read_proc_stat(pids_[""])->state == 'Z' &&
           read_proc_stat(pids_["box"])->state == 'Z';
  }));
}

TEST_F(WorkerTest, UsageErrorsSaySo) {
  std::filesystem::create_directory(scratch());
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--slots", "0"}, "--slots"},
      {{"--nonsense"}, "--nonsense"},
      {{"--name", "a/b"}, "a/b"},
  };
  for (const auto& [args, word] : cases) {
    start("tcp://127.0.0.1:1", "", args);
    EXPECT_EQ(wait(""), 2) << word;
    EXPECT_NE(output("").find(word), std::string::npos) << output("");
  }
  start("/no/such/folder", "x");
  EXPECT_EQ(wait("x"), 2);
  EXPECT_NE(output("x").find("run directory"), std::string::npos);
  start("tcp://nowhere", "x");
  EXPECT_EQ(wait("x"), 2);
  EXPECT_NE(output("x").find("tcp://nowhere"), std::string::npos);
  start("tcp://127.0.0.1:1", "x", {"--trainer", "/no/trainer"});
  EXPECT_EQ(wait("x"), 3);
}

}  // namespace
}  // namespace remesh::agent
