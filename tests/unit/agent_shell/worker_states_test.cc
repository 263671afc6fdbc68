// Workers and the training states in their shared memory: reported when no rank
// lives, kept after a kill, removed when the coordinator no longer needs them.
#include <signal.h>

#include <filesystem>

#include "proto/base/process.h"
#include "tests/testing/expect.h"
#include "tests/unit/agent_shell/worker_fixture.h"

namespace remesh::agent {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kJob = 0xABC;
constexpr uint64_t kOther = 0xDEF;

class WorkerStatesTest : public WorkerTest {
 protected:
  void SetUp() override { c_.set_state_job(kJob); }

  // A new incarnation, which has received a directive.
  void start_again(const std::string& name) {
    const uint64_t before = c_.report(name).incarnation();
    start(c_.address(), name);
    ASSERT_TRUE(c_.run_until([&] {
      return c_.report(name).incarnation() != before &&
             c_.report(name).has_inventory();
    })) << output(name);
  }
  static std::map<int, int64_t> newest_steps(const pb::Report& r) {
    std::map<int, int64_t> by_rank;
    for (const pb::StateHolding& h : r.holdings())
      by_rank[h.rank()] = std::max(by_rank[h.rank()], h.step());
    return by_rank;
  }

  TinyCoordinator c_;
};

TEST_F(WorkerStatesTest, AreReportedOnlyAtTheEndOfAGeneration) {
  join(c_, "a");
  c_.want(pb::Directive::IDLE, pb::Assignment());
  ASSERT_TRUE(c_.run_until([&] { return c_.report("a").has_inventory(); }));
  EXPECT_EQ(c_.report("a").holdings_size(), 0);
  const auto a = assignment({"a"}, 2, "step_ms=1");
  run_generation(c_, a);
  EXPECT_FALSE(c_.report("a").has_inventory());
  EXPECT_EQ(c_.report("a").holdings_size(), 0);
  c_.want(pb::Directive::FINISH, a);
  ASSERT_TRUE(c_.reach({"a"}, pb::Report::QUIESCED, a.generation()));
  const pb::Report& r = c_.report("a");
  ASSERT_TRUE(r.has_inventory());
  EXPECT_EQ(r.damaged_size(), 0);
  ASSERT_EQ(r.holdings_size(), 4);  // two buffers per rank
  for (const pb::RankStatus& rank : r.ranks())
    EXPECT_EQ(newest_steps(r)[rank.rank()], r.ranks(0).committed_step());
  const pb::StateHolding& h = r.holdings(0);
  EXPECT_EQ(h.generation(), a.generation());
  EXPECT_EQ(h.sharding().mesh().dp(), 2);
  EXPECT_EQ(h.sharding().bounds_size(), 2);
  EXPECT_EQ(h.sharding().zero_stage(), 1);
  EXPECT_EQ(h.model(), 77u);
  EXPECT_EQ(h.elements(), 5);
  EXPECT_EQ(h.tokens(), h.step() * 1000);
  EXPECT_EQ(h.sequences(), h.step() * 10);
  EXPECT_FALSE(h.replica());
  EXPECT_EQ(fs::path(h.segment()).parent_path(), states_of("a"));
  // A leaving worker stays until none of its states is needed.
  testing::send_signal(pids_["a"], SIGTERM);
  ASSERT_TRUE(c_.run_until([&] { return c_.report("a").leaving(); }));
  EXPECT_FALSE(c_.run_until(
      [&] { return read_proc_stat(pids_["a"])->state == 'Z'; }, 300));
  EXPECT_EQ(c_.report("a").holdings_size(), 4);
  c_.want(pb::Directive::LEAVE, a);
  EXPECT_TRUE(leaves(c_, "a"));
  EXPECT_FALSE(has_shared("a"));
  EXPECT_EQ(num_entries(scratch()), 0);
}

// As systemd-logind does when a user logs out.
TEST_F(WorkerStatesTest, AreNoLongerReportedOnceRemoved) {
  join(c_, "a");
  const auto a = assignment({"a"}, 2, "step_ms=1");
  run_generation(c_, a);
  EXPECT_GT(c_.report("a").state_room(), 0u);
  c_.want(pb::Directive::FINISH, a);
  ASSERT_TRUE(c_.reach({"a"}, pb::Report::QUIESCED, a.generation()));
  ASSERT_EQ(c_.report("a").holdings_size(), 4);
  fs::remove(c_.report("a").holdings(0).segment());
  ASSERT_TRUE(
      c_.run_until([&] { return c_.report("a").holdings_size() == 2; }));
  EXPECT_TRUE(c_.report("a").has_inventory());
  std::string log;  // written by a thread
  EXPECT_TRUE(c_.run_until([&] {
    std::ifstream in(dir_ / "run/logs/worker-a.log");
    log.assign(std::istreambuf_iterator<char>(in), {});
    return log.find("states_lost") != std::string::npos;
  })) << log;
  EXPECT_HAS(log, "needed its room");
  EXPECT_HAS(log, "enable-linger");
}

TEST_F(WorkerStatesTest, OfAKilledWorkerAreReportedByItsSuccessor) {
  join(c_, "a");
  const auto a = assignment({"a"}, 2, "step_ms=1");
  run_generation(c_, a);
  stop("a", SIGKILL);
  const pb::Report told = c_.report("a");  // each rank commits by itself
  // A coordinator of another job takes its place.
  c_.want(pb::Directive::IDLE, pb::Assignment());  // no run directory, no job
  join(c_, "b");
  start_again("a");
  const pb::Report& r = c_.report("a");
  EXPECT_GE(r.holdings_size(), 2);
  for (const pb::RankStatus& rank : told.ranks())
    EXPECT_GE(newest_steps(r)[rank.rank()], rank.committed_step());
  EXPECT_TRUE(says("a", "states_found")) << output("a");
  c_.want(pb::Directive::SHUTDOWN, pb::Assignment());
  EXPECT_TRUE(leaves(c_, "a"));
  EXPECT_TRUE(leaves(c_, "b")) << output("b");
  EXPECT_TRUE(says("a", "states_removed"));
  EXPECT_FALSE(has_shared("a"));
  EXPECT_EQ(num_entries(scratch()), 0);
}

// The worker "box" had left when "box-2" was killed.
TEST_F(WorkerStatesTest, OfAKilledWorkerAreFoundByOneThatWasGivenNoName) {
  join(c_, "box-2");
  run_generation(c_, assignment({"box-2"}, 1, "step_ms=1"));
  stop("box-2", SIGKILL);
  c_.want(pb::Directive::IDLE, pb::Assignment());
  const uint64_t before = c_.report("box-2").incarnation();
  start(c_.address(), "", {"--host-name", "box"});
  ASSERT_TRUE(c_.run_until([&] {
    return c_.report("box-2").incarnation() != before &&
           c_.report("box-2").has_inventory();
  })) << output("");
  EXPECT_GE(c_.report("box-2").holdings_size(), 1);
  EXPECT_EQ(c_.num_workers(), 1u);
  c_.want(pb::Directive::SHUTDOWN, pb::Assignment());
  EXPECT_TRUE(leaves(c_, "")) << output("");
}

TEST_F(WorkerStatesTest, AreNeitherReportedNorRemovedByAnotherJob) {
  join(c_, "a");
  run_generation(c_, assignment({"a"}, 1, "step_ms=1"));
  stop("a", SIGKILL);
  c_.set_state_job(kOther);
  c_.want(pb::Directive::IDLE, pb::Assignment());
  start_again("a");
  EXPECT_EQ(c_.report("a").holdings_size(), 0);
  EXPECT_TRUE(says("a", "states_of_other_jobs"));
  c_.want(pb::Directive::SHUTDOWN, pb::Assignment());
  EXPECT_TRUE(leaves(c_, "a"));
  EXPECT_EQ(num_entries(states_of("a")), 1);
  EXPECT_TRUE(fs::exists(scratch() + "/a/lock"));
  // The first job returns and uses them.
  c_.set_state_job(kJob);
  c_.want(pb::Directive::IDLE, pb::Assignment());
  start_again("a");
  EXPECT_GE(c_.report("a").holdings_size(), 1);
}

TEST_F(WorkerStatesTest, OfAKilledWorkerAreRemovedWithTheJob) {
  join(c_, "a");
  join(c_, "b");
  join(c_, "c");
  run_generation(c_, assignment({"a", "b", "c"}, 1, "step_ms=1"));
  stop("a", SIGKILL);
  pb::Assignment next;
  next.set_generation(generation_ + 1);
  c_.want(pb::Directive::IDLE, next);
  ASSERT_TRUE(c_.reach({"b", "c"}, pb::Report::IDLE, next.generation()));
  testing::send_signal(pids_["c"], SIGSTOP);
  c_.want(pb::Directive::LEAVE, next);
  EXPECT_TRUE(leaves(c_, "b"));
  EXPECT_FALSE(has_shared("b"));
  EXPECT_EQ(num_entries(states_of("a")), 1);
  EXPECT_EQ(num_entries(states_of("c")), 1);
  // The last incarnation receives only the final directive.
  stop("c", SIGKILL);
  c_.want(pb::Directive::SHUTDOWN, next);
  start(c_.address(), "c");
  EXPECT_TRUE(leaves(c_, "c"));
  EXPECT_FALSE(has_shared("a"));
  EXPECT_FALSE(has_shared("c"));
  EXPECT_EQ(num_entries(scratch()), 0);
}

TEST_F(WorkerStatesTest, StayAfterASecondInterrupt) {
  join(c_, "a");
  run_generation(c_, assignment({"a"}, 1, "step_ms=1"));
  const auto segment = fs::directory_iterator(states_of("a"))->path();
  testing::send_signal(pids_["a"], SIGTERM);
  ASSERT_TRUE(c_.run_until([&] { return c_.report("a").leaving(); }));
  usleep(1'100'000);  // a second one within a second does not count
  // From now on, and not since it last looked after them.
  const auto before = fs::file_time_type::clock::now() - std::chrono::hours(1);
  fs::last_write_time(segment, before);
  EXPECT_EQ(stop("a", SIGTERM), 130);
  EXPECT_EQ(num_entries(states_of("a")), 1);
  EXPECT_NE(fs::last_write_time(segment), before);
}

}  // namespace
}  // namespace remesh::agent
