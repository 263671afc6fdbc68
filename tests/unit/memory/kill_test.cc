// A process that is killed between any two instructions of its updates leaves
// one complete state, at most one step old.
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <random>
#include <thread>

#include "tests/testing/seed.h"
#include "tests/testing/segment_states.h"
#include "tests/testing/temp_dir.h"

namespace remesh::memory {
namespace {

constexpr uint64_t kJob = 5;

// The endless loop of a child.
void update_for_ever(StateSegment& s, int64_t elements) {
  const auto c = s.contents();
  int64_t step = c.states.empty() ? 0 : c.states[0].info.step;
  while (true) update(s, info_of(++step, elements));
}

// Generations that reuse the state in place; every second one fails, and the
// next starts from the state that the failed one started from.
void take_over_for_ever(StateSegment& s, int64_t) {
  auto from = s.contents().states[0];
  while (true) {
    StateInfo info = from.info;
    ++info.generation;
    (void)s.redescribe(from, info);
    ++info.generation;
    from = s.redescribe(from, info);
  }
}

pid_t start_child(const std::string& path, int64_t elements, bool traced,
                  void (*work)(StateSegment&, int64_t)) {
  const pid_t child = fork();
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  auto s = StateSegment::open(path, kJob, StateSegment::Mode::kWrite);
  if (!s.ok()) _exit(2);
  if (traced) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(3);
    raise(SIGSTOP);
  }
  work(**s, elements);
  _exit(4);
}

// Runs the child one instruction at a time until look() returns true. Returns
// false when single-stepping is not possible here.
bool step_through(pid_t child, const std::function<bool()>& look) {
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  if (WIFEXITED(status)) {
    EXPECT_EQ(WEXITSTATUS(status), 3);
    return false;
  }
  for (int i = 0; i < 2'000'000 && !testing::Test::HasFailure(); ++i) {
    if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0) break;
    if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) break;
    if (look()) break;
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return true;
}

TEST(StateSegmentKill, EveryInstructionOfAnUpdate) {
  const ShmDir dir;
  constexpr int64_t kElements = 20;
  ASSERT_OK_AND(auto made, StateSegment::create(dir / "s", kJob, kElements));
  update(*made, info_of(1, kElements));
  made.reset();
  ASSERT_OK_AND(const auto seen,
                StateSegment::open(dir / "s", kJob, StateSegment::Mode::kRead));
  int64_t last = 1;
  int with_one = 0;
  const pid_t child = start_child(dir / "s", kElements, true, update_for_ever);
  const bool possible = step_through(child, [&] {
    const int64_t now = newest_step(*seen);
    EXPECT_TRUE(now == last || now == last + 1) << now << " after " << last;
    last = now;
    if (seen->contents().states.size() == 1) ++with_one;
    return last == 5;
  });
  if (!possible) GTEST_SKIP() << "needs ptrace";
  EXPECT_EQ(last, 5);
  EXPECT_GT(with_one, 100);  // some updates were incomplete
}

// The record that the generation started from is valid at every instant.
TEST(StateSegmentKill, EveryInstructionOfReuse) {
  const ShmDir dir;
  ASSERT_OK_AND(auto made, StateSegment::create(dir / "s", kJob, 4));
  update(*made, info_of(1, 4));
  made.reset();
  ASSERT_OK_AND(const auto seen,
                StateSegment::open(dir / "s", kJob, StateSegment::Mode::kRead));
  int64_t newest = 3, least = 3;
  const pid_t child = start_child(dir / "s", 4, true, take_over_for_ever);
  const bool possible = step_through(child, [&] {
    const auto c = seen->contents();
    EXPECT_TRUE(c.damaged.empty());
    EXPECT_FALSE(c.states.empty());
    if (c.states.empty()) return true;
    // Others start from generations 3, 5, 7 ...
    int64_t begun_with = 0;
    for (const auto& state : c.states)
      if (state.info.generation % 2 == 1)
        begun_with = std::max(begun_with, state.info.generation);
    EXPECT_GE(begun_with, least);
    least = std::max(least, begun_with);
    newest = std::max(newest, c.states[0].info.generation);
    return newest >= 11;
  });
  if (!possible) GTEST_SKIP() << "needs ptrace";
  EXPECT_EQ(newest, 11);
}

TEST(StateSegmentKill, RandomInstants) {
  const uint32_t seed = test_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const ShmDir dir;
  constexpr int64_t kElements = 20000;
  ASSERT_OK_AND(auto made, StateSegment::create(dir / "s", kJob, kElements));
  update(*made, info_of(1, kElements));
  made.reset();
  int64_t last = 1;
  for (int i = 0; i < 60; ++i) {
    const pid_t child =
        start_child(dir / "s", kElements, false, update_for_ever);
    ASSERT_OK_AND(
        const auto watched,
        StateSegment::open(dir / "s", kJob, StateSegment::Mode::kRead));
    const auto stands = [&] {
      const auto states = watched->contents().states;
      return states.empty() || states[0].info.step <= last;
    };
    int status = 0;
    while (stands() && waitpid(child, &status, WNOHANG) == 0) sched_yield();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 8000));
    kill(child, SIGKILL);
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
    // Like a restarted daemon.
    ASSERT_OK_AND(const auto s, StateSegment::open(dir / "s", kJob,
                                                   StateSegment::Mode::kWrite));
    const int64_t now = newest_step(*s);
    ASSERT_GE(now, last);
    last = now;
  }
  EXPECT_GT(last, 60);
}

}  // namespace
}  // namespace remesh::memory
