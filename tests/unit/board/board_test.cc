#include "worker/board/board.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "tests/testing/expect.h"

namespace remesh::board {
namespace {

struct Pair {
  std::unique_ptr<Board> daemon;
  std::unique_ptr<Board> rank;
};
Pair make_pair() {
  Pair p;
  p.daemon = std::move(Board::create(7, 3)).value();
  p.rank = std::move(Board::open(dup(p.daemon->fd()))).value();
  return p;
}

TEST(Board, RankAndDaemonSeeEachOther) {
  Pair p = make_pair();
  EXPECT_EQ(p.rank->generation(), 7);
  EXPECT_EQ(p.rank->rank(), 3);
  EXPECT_EQ(p.daemon->snapshot().committed_step(), -1);
  p.rank->set_phase(pb::RankStatus::COMPUTE);
  p.rank->set_step(11);
  p.rank->set_microbatch(2);
  p.rank->commit_step(10);
  p.rank->set_checkpoint_step(5);
  p.rank->decline_stop();
  p.rank->set_error("bad thing");
  p.rank->set_checkpoint_error(exhausted("disk full"));
  const pb::RankStatus s = p.daemon->snapshot();
  EXPECT_EQ(s.phase(), pb::RankStatus::COMPUTE);
  EXPECT_EQ(s.step(), 11);
  EXPECT_EQ(s.microbatch(), 2);
  EXPECT_EQ(s.committed_step(), 10);
  EXPECT_EQ(p.daemon->committed_step(), 10);
  EXPECT_EQ(s.checkpoint_step(), 5);
  EXPECT_EQ(s.declined_stops(), 1);
  EXPECT_EQ(s.error(), "bad thing");
  EXPECT_EQ(s.checkpoint_error(), "exhausted: disk full");
  EXPECT_EQ(s.checkpoint_code(), "exhausted");
  EXPECT_GT(s.progress(), 2u);
  p.rank->set_checkpoint_error(ok_status());
  EXPECT_FALSE(p.daemon->snapshot().has_checkpoint_error());
  EXPECT_FALSE(p.daemon->snapshot().has_checkpoint_code());
  p.rank->fail_save(io_error("disk broken"));
  EXPECT_EQ(p.daemon->snapshot().checkpoint_code(), "io");
  EXPECT_EQ(p.daemon->snapshot().failed_saves(), 1);
  p.daemon->set_request(kRequestStop | kRequestForce);
  p.daemon->set_checkpoint_request(4);
  p.daemon->beat(99);
  EXPECT_EQ(p.rank->request(), kRequestStop | kRequestForce);
  EXPECT_EQ(p.rank->checkpoint_request(), 4);
  EXPECT_EQ(p.rank->daemon_beat_ms(), 99);
}

TEST(Board, EverySignOfLifeAdvancesTheProgress) {
  Pair p = make_pair();
  uint64_t last = p.daemon->snapshot().progress();
  const auto moved = [&] {
    const uint64_t now = p.daemon->snapshot().progress();
    return std::exchange(last, now) < now;
  };
  EXPECT_FALSE(moved());
  p.rank->tick();
  EXPECT_TRUE(moved());
  p.rank->set_phase(pb::RankStatus::REDUCE);
  EXPECT_TRUE(moved());
  p.rank->set_microbatch(1);
  EXPECT_TRUE(moved());
  p.rank->commit_step(1);
  EXPECT_TRUE(moved());
}

TEST(Board, SharesAndMemoryAreShownOnceMeasured) {
  Pair p = make_pair();
  const pb::RankStatus before = p.daemon->snapshot();
  EXPECT_FALSE(before.has_exposed_comm());
  EXPECT_FALSE(before.has_bubble());
  EXPECT_FALSE(before.has_memory());
  EXPECT_FALSE(before.has_link_bytes_per_s());
  EXPECT_FALSE(before.has_error());
  EXPECT_FALSE(before.has_checkpoint_error());
  const MemoryUse m{.weights = 1,
                    .gradients = 2,
                    .optimizer = 3,
                    .activations = 4,
                    .buffers = uint64_t{5} << 40};
  p.rank->set_memory(m);
  p.rank->set_shares(0.25, 0.125);
  EXPECT_EQ(memory_of(p.daemon->snapshot().memory()), m);
  EXPECT_EQ(p.daemon->snapshot().exposed_comm(), 0.25);
  EXPECT_EQ(p.daemon->snapshot().bubble(), 0.125);
  EXPECT_FALSE(p.daemon->snapshot().has_restored_digest());
  p.rank->set_restored_digest(0);
  EXPECT_TRUE(p.daemon->snapshot().has_restored_digest());
  p.rank->set_link(1.5e9);
  EXPECT_EQ(p.daemon->snapshot().link_bytes_per_s(), 1.5e9);
}

TEST(Board, APhaseThatTheRankHasDamagedIsUnknown) {
  Pair p = make_pair();
  for (int phase = pb::RankStatus::STARTING; phase <= pb::RankStatus::UNKNOWN;
       ++phase) {
    p.rank->set_phase(static_cast<pb::RankStatus::Phase>(phase));
    EXPECT_EQ(p.daemon->snapshot().phase(), phase);
  }
  p.rank->set_phase(static_cast<pb::RankStatus::Phase>(99));
  EXPECT_EQ(p.daemon->snapshot().phase(), pb::RankStatus::UNKNOWN);
}

TEST(Board, LongTextIsCut) {
  Pair p = make_pair();
  p.rank->set_error(std::string(100000, 'x'));
  EXPECT_EQ(p.daemon->snapshot().error(), std::string(2048, 'x'));
}

TEST(Board, FullRingRefusesAndKeepsOrder) {
  Pair p = make_pair();
  int64_t pushed = 0;
  while (p.rank->push_step({.step = pushed})) ++pushed;
  EXPECT_EQ(pushed, 4096);
  auto steps = p.daemon->pop_steps();
  ASSERT_EQ(steps.size(), 4096u);
  for (int64_t i = 0; i < pushed; ++i)
    ASSERT_EQ(steps[static_cast<size_t>(i)].step, i);
  EXPECT_TRUE(p.daemon->pop_steps().empty());
  EXPECT_TRUE(p.rank->push_step({.step = pushed}));
  EXPECT_EQ(p.daemon->pop_steps().size(), 1u);
}

TEST(Board, OtherMemoryIsRefused) {
  EXPECT_FALSE(Board::open(-1).ok());
  const int small = memfd_create("x", MFD_CLOEXEC);
  EXPECT_FALSE(Board::open(small).ok());
  close(small);
  Pair p = make_pair();
  char zeros[8] = {};
  ASSERT_EQ(pwrite(p.daemon->fd(), zeros, sizeof(zeros), 0), 8);
  const int fd = dup(p.daemon->fd());
  EXPECT_SAYS(Board::open(fd), "magic");
  close(fd);
}

// A rank thread writes everything while a daemon thread reads: no step is lost,
// duplicated or torn. Meant for ThreadSanitizer.
TEST(Board, ConcurrentUseLosesNothing) {
  Pair p = make_pair();
  constexpr int64_t kSteps = 20000;
  std::thread rank([&] {
    for (int64_t i = 0; i < kSteps; ++i) {
      p.rank->set_step(i);
      p.rank->set_error(std::string(100, static_cast<char>('a' + i % 26)));
      while (!p.rank->push_step(
          {.step = i, .loss = static_cast<double>(i), .tokens = 3 * i}))
        std::this_thread::yield();
      p.rank->commit_step(i);
    }
  });
  int64_t next = 0;
  while (next < kSteps) {
    const int64_t committed = p.daemon->committed_step();
    p.daemon->beat(next);
    p.daemon->set_request(kRequestStop);
    for (const StepRecord& r : p.daemon->pop_steps()) {
      ASSERT_EQ(r.step, next);
      ASSERT_EQ(r.loss, static_cast<double>(next));
      ASSERT_EQ(r.tokens, 3 * next);
      ++next;
    }
    // Steps committed before the ring was read were in the ring.
    ASSERT_LT(committed, next);
    const pb::RankStatus s = p.daemon->snapshot();
    ASSERT_LE(s.error().size(), 100u);
  }
  rank.join();
  EXPECT_EQ(p.daemon->snapshot().error().size(), 100u);
}

TEST(Board, TheLastErrorSurvivesAKill) {
  Pair p = make_pair();
  const pid_t child = fork();
  if (child == 0) {
    p.rank->set_error("last words");
    p.rank->push_step({.step = 1});
    kill(getpid(), SIGKILL);
  }
  waitpid(child, nullptr, 0);
  EXPECT_EQ(p.daemon->snapshot().error(), "last words");
  EXPECT_EQ(p.daemon->pop_steps().size(), 1u);
}

}  // namespace
}  // namespace remesh::board
