// Who failed first, over constructed cases.
#include "coordinator/core/cause.h"

#include <csignal>
#include <deque>
#include <random>

#include "proto/base/exit_code.h"
#include "tests/testing/expect.h"
#include "tests/testing/seed.h"
#include "tests/testing/text_message.h"

namespace remesh::core {
namespace {

// Ranks of a mesh, rank r on worker "w<r>".
class Ranks {
 public:
  // The status of a new rank that computes.
  pb::RankStatus& add(int64_t stalled_ms = 5000) {
    const int rank = static_cast<int>(statuses_.size());
    pb::RankStatus& s = statuses_.emplace_back();
    merge_text("step: 4 os_state: 'R'", &s);
    s.set_rank(rank);
    views_.push_back({.status = &s,
                      .worker = "w" + std::to_string(rank),
                      .host = "h" + std::to_string(rank),
                      .stalled_ms = stalled_ms});
    return s;
  }
  // It waits in the `number`th collective on a group.
  pb::RankStatus& in_collective(const std::string& group,
                                const std::vector<int>& ranks, int64_t number,
                                int64_t step = 4) {
    pb::RankStatus& s = add();
    s.set_step(step);
    s.set_waits(true);
    pb::RankOperation* at = s.mutable_at();
    at->set_name("all_reduce");
    at->set_group(group);
    at->mutable_ranks()->Assign(ranks.begin(), ranks.end());
    at->set_number(number);
    s.set_doing("step " + std::to_string(step) + ", all_reduce on " + group);
    return s;
  }
  pb::RankStatus& in_recv(int from, int64_t step = 4) {
    pb::RankStatus& s = add();
    merge_text("waits: true at { name: 'wait recv' group: 'pp' }", &s);
    s.set_step(step);
    s.mutable_at()->set_peer(from);
    s.set_doing("step " + std::to_string(step) + ", wait recv from rank " +
                std::to_string(from));
    return s;
  }
  // It died.
  pb::RankStatus& dead(int signal, int exit_code, double time) {
    pb::RankStatus& s = add();
    s.set_exited(true);
    s.set_signal(signal);
    s.set_exit_code(exit_code);
    s.set_exit_time(time);
    s.clear_os_state();
    return s;
  }
  // The newest rank is on this host, and its end was reported at that time.
  void seen(const std::string& host, int64_t at_ms) {
    views_.back().host = host;
    views_.back().exit_seen_ms = at_ms;
  }
  const std::vector<RankView>& views() const { return views_; }
  Stuck stuck() const { return find_stuck(views_); }
  std::string text() const { return stuck_text(views_, stuck()); }

 private:
  std::deque<pb::RankStatus> statuses_;
  std::vector<RankView> views_;
};

// ------------------------------------------------------------------- deaths

TEST(FirstDeath, NobodyDied) {
  Ranks r;
  EXPECT_FALSE(first_death(r.views()));
  r.add();
  r.dead(0, 0, 1);                                   // in order
  r.dead(SIGKILL, 0, 1).set_killed_by_worker(true);  // in an abort
  EXPECT_FALSE(first_death(r.views()));
}

TEST(FirstDeath, TheEarliestSignalOutweighsExitCodes) {
  Ranks r;
  r.dead(0, 1, 1.0).set_error("peer gone");
  r.dead(0, 1, 0.5);
  EXPECT_EQ(first_death(r.views()), 0U);  // own words
  r.dead(SIGKILL, 0, 3.0);
  EXPECT_EQ(first_death(r.views()), 2U);
  r.dead(SIGSEGV, 0, 2.0);
  EXPECT_EQ(first_death(r.views()), 3U);
  r.dead(SIGKILL, 0, 2.0);  // at the same time
  EXPECT_EQ(first_death(r.views()), 3U);
}

// Clocks of two hosts may differ by hours; those of one do not.
TEST(FirstDeath, TimesOfTwoHostsAreNotCompared) {
  Ranks r;
  r.dead(SIGKILL, 0, 10'000.0);  // its clock is ahead
  r.seen("a", 500);
  r.dead(SIGKILL, 0, 1.0);
  r.seen("b", 700);
  EXPECT_EQ(first_death(r.views()), 0U);
  // One report may tell of several deaths, in any order.
  r.dead(SIGKILL, 0, 9'999.5);
  r.seen("a", 500);
  EXPECT_EQ(first_death(r.views()), 2U);
  // What tells a culprit from its victims counts before any time.
  r.dead(0, 1, 0.5).set_error("loss is not finite");
  r.seen("c", 100);
  EXPECT_EQ(first_death(r.views()), 2U);
}

// MPI aborts the peers of a dead rank, or they exit without a word, in the
// middle of a wait for it; and may be heard first.
TEST(FirstDeath, ARankThatDiedWaitingIsAVictim) {
  Ranks r;
  r.dead(SIGABRT, 0, 1.0).set_waits(true);
  r.dead(0, 14, 1.1).set_waits(true);
  EXPECT_EQ(first_death(r.views()), 0U);  // nobody else: it is
  r.dead(0, 1, 1.2);
  EXPECT_EQ(first_death(r.views()), 2U);
  r.dead(0, 1, 1.3).set_error("loss is not finite");
  EXPECT_EQ(first_death(r.views()), 3U);
  r.dead(SIGABRT, 0, 1.4);  // a check failed while it computed
  EXPECT_EQ(first_death(r.views()), 4U);
  // A rank that was killed while it waited was killed all the same.
  Ranks k;
  k.dead(0, 1, 1.0).set_error("loss is not finite");
  k.dead(SIGKILL, 0, 2.0).set_waits(true);
  EXPECT_EQ(first_death(k.views()), 1U);
}

TEST(FirstDeath, DescribesTheDeath) {
  Ranks r;
  pb::RankStatus& s = r.dead(SIGKILL, 0, 1);
  s.set_last_log("the last line");
  const auto text = [&] { return death_text(r.views()[0]); };
  EXPECT_EQ(text(),
            "killed by signal 9 (SIGKILL); last log line: the last line");
  s.set_doing("step 4, microbatch 1, forward");
  s.mutable_at()->set_seconds(0.1);
  EXPECT_EQ(text(),
            "killed by signal 9 (SIGKILL); it was at step 4, microbatch 1, "
            "forward for 0.1 s");
  s.set_signal(0);
  s.set_exit_code(14);
  EXPECT_EQ(text(),
            "exit code 14; it was at step 4, microbatch 1, forward for 0.1 s; "
            "last log line: the last line");
  s.set_error("out of memory");
  EXPECT_EQ(text(),
            "exit code 14: out of memory; it was at step 4, microbatch 1, "
            "forward for 0.1 s");
}

TEST(FirstDeath, TheEventHasAllFields) {
  Ranks r;
  pb::RankStatus& s = r.dead(SIGSEGV, 0, 1);
  merge_text(
      "doing: 'step 4, optimizer' at { seconds: 0.1 } "
      "flight_record: 'flight-g001-rank-0.json' log_tail: ['one', 'two']",
      &s);
  pb::EventRecord e;
  fill_failure(r.views()[0], &e);
  EXPECT_EQ(e.host(), "h0");
  EXPECT_EQ(e.signal(), SIGSEGV);
  EXPECT_FALSE(e.has_exit_code());
  EXPECT_EQ(e.doing(), "step 4, optimizer for 0.1 s");
  EXPECT_EQ(e.flight_record(), "flight-g001-rank-0.json");
  ASSERT_EQ(e.last_log_size(), 2);
  EXPECT_EQ(e.last_log(1), "two");
  // One that was stuck was ended by its worker: that is not how it failed.
  s.set_killed_by_worker(true);
  pb::EventRecord stuck;
  fill_failure(r.views()[0], &stuck);
  EXPECT_FALSE(stuck.has_signal());
  EXPECT_TRUE(stuck.has_doing());
}

// -------------------------------------------------------------------- hangs

TEST(Hang, NamesTheOneThatDoesNotWait) {
  Ranks r;
  r.in_collective("tp", {0, 1}, 9);
  r.add().set_doing("step 4, microbatch 3, forward");
  r.in_collective("dp", {0, 2}, 3);
  EXPECT_EQ(r.stuck().rank, 1U);
  EXPECT_FALSE(r.stuck().lost_message);
  EXPECT_EQ(r.text(),
            "no progress for 5.0 s at step 4, microbatch 3, forward; 2 other "
            "ranks wait for it");
}

TEST(Hang, AStoppedProcessIsNamedFirst) {
  Ranks r;
  r.add(9000);
  r.in_collective("tp", {0, 1}, 9).set_os_state("T");
  EXPECT_EQ(r.stuck().rank, 1U);
  EXPECT_EQ(r.text(),
            "no progress for 5.0 s at step 4, all_reduce on tp (its process is "
            "stopped)");
}

TEST(Hang, NamesTheOneThatStalledLongest) {
  Ranks r;
  r.add(4000);
  r.add(6000);
  r.add(5000);
  EXPECT_EQ(r.stuck().rank, 1U);
  // Nothing is known but how long: as before flight records.
  EXPECT_EQ(r.text(), "no progress for 6.0 s at step 4, microbatch 0");
}

TEST(Hang, AllInOneCollectiveHaveLostAMessage) {
  Ranks r;
  for (int i = 0; i < 3; ++i) r.in_collective("dp", {0, 1, 2}, 9);
  EXPECT_TRUE(r.stuck().lost_message);
  EXPECT_EQ(r.text(),
            "no progress for 5.0 s: every rank waits for others, rank 0 on "
            "worker w0 at step 4, all_reduce on dp: a message was lost");
}

// Ranks 2 and 3 wait for the tensor-parallel pair 0 and 1, which wait for each
// other in the same operation.
TEST(Hang, NamesTheCycleThatTheOthersWaitFor) {
  Ranks r;
  r.in_collective("tp", {0, 1}, 40);
  r.in_collective("tp", {0, 1}, 40);
  r.in_collective("dp", {0, 2}, 7);
  r.in_collective("dp", {1, 3}, 7);
  EXPECT_TRUE(r.stuck().lost_message);
  EXPECT_EQ(r.stuck().rank, 0U);
}

// A pipeline whose last stage waits for a message that never came: the sender
// has gone on and waits for the answer to it.
TEST(Hang, AMessageLostBetweenStages) {
  Ranks r;
  r.in_recv(1, 5);  // backward of the last stage's
  r.in_recv(2, 5);
  r.in_recv(1, 4);  // behind: its activations did not come
  EXPECT_TRUE(r.stuck().lost_message);
  EXPECT_EQ(r.stuck().rank, 2U);
}

// One rank is past a collective that another still waits in.
TEST(Hang, ARankPastACollectiveIsNotBlamed) {
  Ranks r;
  r.in_collective("dp", {0, 1}, 9, 5);  // waits for 1
  r.in_collective("dp", {0, 1}, 8, 5);  // has missed what 0 sent
  EXPECT_TRUE(r.stuck().lost_message);
  EXPECT_EQ(r.stuck().rank, 1U);
}

TEST(Hang, ConnectingRanksWaitForThoseThatHaveNotBegun) {
  Ranks r;
  r.add().set_waits(true);
  r.add();
  EXPECT_EQ(r.stuck().rank, 1U);
  Ranks all;
  all.add().set_waits(true);
  all.add().set_waits(true);
  EXPECT_TRUE(all.stuck().lost_message);
}

// Whatever the mesh and wherever everybody is: one rank that does something of
// its own is the one to blame, and who is blamed otherwise waits.
TEST(Hang, ASingleWorkingRankIsAlwaysFound) {
  const uint32_t seed = test_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto below = [&](int n) {
    return static_cast<int>(random() % static_cast<uint32_t>(n));
  };
  for (int round = 0; round < 500; ++round) {
    const int n = 1 + below(12);
    const int culprit = below(n + 1);  // n: nobody
    Ranks r;
    for (int i = 0; i < n; ++i) {
      if (i == culprit) {
        r.add(1 + below(9));
      } else if (below(2) == 0) {
        r.in_recv(below(n), below(3));
      } else {
        std::vector<int> group;
        for (int j = 0; j < n; ++j)
          if (j == i || below(2) == 0) group.push_back(j);
        r.in_collective("dp", group, below(4), below(3));
      }
    }
    const Stuck s = r.stuck();
    if (culprit < n) {
      EXPECT_EQ(s.rank, static_cast<size_t>(culprit));
      EXPECT_FALSE(s.lost_message);
    } else {
      EXPECT_TRUE(s.lost_message);
      EXPECT_LT(s.rank, static_cast<size_t>(n));
    }
    EXPECT_HAS(r.text(), "no progress for");
  }
}

// -------------------------------------------------------------------- links

TEST(SilentLinks, RanksThatExchangeMessagesNameTheLink) {
  Ranks r;
  r.in_recv(1);
  r.in_recv(0);
  r.in_recv(1);  // waits for one of them
  EXPECT_EQ(silent_links(r.views(), r.stuck()),
            (std::vector<Link>{{"h0", "h1"}}));
  EXPECT_TRUE(silent_hosts(r.views(), r.stuck()).empty());
}

TEST(SilentLinks, InACollectiveAnyLinkOfItsHostsIsSuspected) {
  Ranks r;
  for (int i = 0; i < 3; ++i) r.in_collective("dp", {0, 1, 2}, 7);
  EXPECT_TRUE(silent_links(r.views(), r.stuck()).empty());
  EXPECT_EQ(silent_hosts(r.views(), r.stuck()),
            (std::set<std::string>{"h0", "h1", "h2"}));
  // Connecting: no operation is known.
  Ranks starting;
  for (int i = 0; i < 2; ++i) starting.add().set_waits(true);
  EXPECT_EQ(silent_hosts(starting.views(), starting.stuck()),
            (std::set<std::string>{"h0", "h1"}));
}

TEST(SilentLinks, NobodyElseIsToBlameForARankThatHangs) {
  Ranks r;
  r.in_recv(1);
  r.add();
  EXPECT_TRUE(silent_links(r.views(), r.stuck()).empty());
}

// Others that end for the same reason of their own are not its victims.
TEST(DiedLike, CountsEndsThatNoPeerExplains) {
  auto first = text_message<pb::RankStatus>(
      "exited: true exit_code: 3 phase: CONNECTING");
  pb::RankStatus other = first;
  EXPECT_TRUE(died_like(other, first));
  other.set_killed_by_worker(true);
  EXPECT_FALSE(died_like(other, first));
  other.set_killed_by_worker(false);
  other.set_exit_code(1);
  EXPECT_FALSE(died_like(other, first));
  first.set_exit_code(1);
  EXPECT_FALSE(died_like(other, first)) << "MPI may have ended it";
  other.set_phase(pb::RankStatus::STARTING);
  EXPECT_TRUE(died_like(other, first)) << "it was on its own";
  for (pb::RankStatus* s : {&first, &other})
    merge_text("exit_code: 0 signal: 9", s);
  EXPECT_TRUE(died_like(other, first));
  other.set_signal(11);
  EXPECT_FALSE(died_like(other, first));
}

TEST(FirstDeath, ARankWithoutItsPeerIsAVictim) {
  Ranks r;
  r.dead(0, kExitWorld, 1.0).set_error("MPI: the peer is gone");
  r.dead(0, 1, 2.0);
  EXPECT_EQ(first_death(r.views()), 1U);
}

}  // namespace
}  // namespace remesh::core
