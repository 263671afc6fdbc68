// Failures: when the detector finds one, and what the budget allows.
#include <gtest/gtest.h>

#include "coordinator/core/cordons.h"
#include "coordinator/core/failure_budget.h"
#include "coordinator/core/failure_detector.h"
#include "proto/base/exit_code.h"
#include "proto/base/text.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

pb::Elastic elastic() {
  return text_message<pb::Elastic>(
      "report_every_ms: 100 hang_after_s: 2 max_same_failures: 3 "
      "max_failures_without_progress: 5");
}

struct Fixture : RosterFixture {
  FailureDetector detector{elastic()};

  Fixture() { durable = running({"a", "b"}); }
  std::optional<pb::Cause> find(int64_t now_ms) const {
    return detector.find(view(now_ms));
  }
};

class FailureDetectorTest : public testing::Test, protected Fixture {};

TEST_F(FailureDetectorTest, NamesTheRankThatWasKilledNotItsVictim) {
  hear(running_report("a", 1, 0, 3), 0);
  pb::Report victim = running_report("b", 1, 1, 3);
  merge_text("exited: true exit_code: 1 waits: true", victim.mutable_ranks(0));
  hear(victim, 10);
  const auto noticed = find(20);
  ASSERT_TRUE(noticed);
  EXPECT_EQ(noticed->rank(), 1);
  pb::Report culprit = running_report("a", 2, 0, 3);
  merge_text("exited: true signal: 9", culprit.mutable_ranks(0));
  hear(culprit, 30);
  const pb::Cause settled = detector.settle(*noticed, view(40));
  EXPECT_EQ(settled.rank(), 0);
  EXPECT_TRUE(settled.by_signal());
}

TEST_F(FailureDetectorTest, AnyHostOfThePlanMayBeTheOneThatCannotBeReached) {
  durable = running({"a", "b", "c"});
  pb::Report r = running_report("a", 1, 0, 0);
  merge_text("phase: CONNECTING exited: true", r.mutable_ranks(0));
  r.mutable_ranks(0)->set_exit_code(kExitWorld);
  hear(r, 0);
  hear(running_report("b", 1, 1, 0), 0);
  const auto failure = find(10);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->between_size(), 3) << "c has not reported yet";
}

TEST_F(FailureDetectorTest, ALostParticipantIsAFailureALostSpareIsNot) {
  durable.mutable_assignment()->mutable_ranks()->RemoveLast();
  hear(running_report("a", 1, 0, 3), 0);
  EXPECT_FALSE(find(10)) << "b has no ranks";
  roster.expire(durable, 50, 100);
  const auto lost = find(100);
  ASSERT_TRUE(lost);
  EXPECT_EQ(lost->worker(), "a");
}

// A worker that says so again and again would hold up the job without end.
TEST_F(FailureDetectorTest, AWorkerThatTakesItsStateBackIsAtFault) {
  durable = running({"a", "b"}, pb::Durable::PREPARING);
  merge_text("kind: MEMORY step: 3 states { worker: 'b' step: 3 rank: 1 }",
             durable.mutable_assignment()->mutable_source());
  hear(report("a", 0));
  pb::Report has = report("b", 0);
  merge_text("has_inventory: true holdings { step: 3 rank: 1 }", &has);
  hear(has);
  EXPECT_FALSE(detector.find_unprepared(view(), false, false));
  has.clear_holdings();
  hear(has);
  auto f = detector.find_unprepared(view(), false, false);
  ASSERT_TRUE(f);
  EXPECT_FALSE(f->planned());
  EXPECT_EQ(text_of(*f),
            "worker b on host-b: lost a state that the generation starts from");
  EXPECT_EQ(f->hosts(0), "host-b");
  // A journal may be older than what its workers have, and a worker that was
  // started again has no state.
  EXPECT_TRUE(detector.find_unprepared(view(), true, false)->planned());
  has.set_incarnation(2);
  hear(has);
  f = detector.find_unprepared(view(), false, false);
  EXPECT_TRUE(!f || f->planned() || f->what() == "its daemon was restarted");
}

TEST_F(FailureDetectorTest, NamesAllHostsWhoseRanksEndedTheSameWay) {
  for (const auto& [name, rank] : {std::pair("a", 0), {"b", 1}}) {
    pb::Report r = running_report(name, 1, rank, 0);
    merge_text("exited: true exit_code: 3", r.mutable_ranks(0));
    hear(r, 100);
  }
  const auto failure = find(100);
  ASSERT_TRUE(failure);
  EXPECT_EQ(join({failure->hosts().begin(), failure->hosts().end()}),
            "host-a, host-b");
}

TEST_F(FailureDetectorTest, APeerThatCannotBeReachedIsABadLink) {
  for (const bool peer_dies : {false, true}) {
    Fixture f;
    pb::Report a = running_report("a", 1, 0, 0);
    merge_text("exited: true exit_code: 1 waits: true at { peer: 1 }",
               a.mutable_ranks(0));
    f.hear(a, 100);
    pb::Report b = running_report("b", 1, 1, 0);
    b.mutable_ranks(0)->set_exited(peer_dies);
    b.mutable_ranks(0)->set_signal(peer_dies ? 9 : 0);
    f.hear(b, 100);
    const auto failure = f.find(100);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->rank(), peer_dies ? 1 : 0);
    EXPECT_EQ(failure->links_size(), peer_dies ? 0 : 2);
    EXPECT_EQ(failure->hosts().empty(), !peer_dies);
  }
}

TEST_F(FailureDetectorTest, AHangNeedsProgressFirstAndFreshReports) {
  const auto hear_both = [&](uint64_t seq, int64_t now_ms) {
    hear(running_report("a", seq, 0, 3, 5), now_ms);
    hear(running_report("b", seq, 1, 3, 5), now_ms);
  };
  uint64_t seq = 0;
  for (int64_t t = 0; t <= 3000; t += 100) hear_both(++seq, t);
  EXPECT_FALSE(find(3000)) << "starting takes longer";
  detector.note_progress();
  EXPECT_TRUE(find(3000));
  EXPECT_FALSE(find(3000 + 501)) << "nobody has reported lately";
  hear(running_report("a", ++seq, 0, 4, 6), 3100);
  hear(running_report("b", seq, 1, 4, 6), 3100);
  EXPECT_FALSE(find(3100)) << "progress was made";
}

// As when it receives a large state, or reads one from a slow disk.
TEST_F(FailureDetectorTest,
       ARankThatMakesProgressIsNotHungHoweverLongOthersWait) {
  enum class Other { kWaits, kMovesMessages, kHasNoTurn };
  for (const Other other :
       {Other::kWaits, Other::kMovesMessages, Other::kHasNoTurn}) {
    Fixture f;
    f.detector.note_progress();
    uint64_t seq = 0, progress = 0;
    const auto pass = [&](int64_t from_ms, int64_t to_ms, bool moves) {
      for (int64_t t = from_ms; t <= to_ms; t += 100) {
        pb::Report a = running_report("a", ++seq, 0, 3, 5);
        merge_text("at { group: 'world' number: 9 }", a.mutable_ranks(0));
        a.mutable_ranks(0)->set_waits(other != Other::kHasNoTurn);
        f.hear(a, t);
        progress += moves ? 1 : 0;
        pb::Report b = running_report("b", seq, 1, 3, progress);
        if (other == Other::kMovesMessages)
          merge_text("waits: true at { group: 'data' number: 1 ranks: 1 }",
                     b.mutable_ranks(0));
        f.hear(b, t);
      }
    };
    pass(0, 5000, true);
    EXPECT_FALSE(f.find(5000)) << static_cast<int>(other);
    pass(5100, 7200, false);
    const auto failure = f.find(7200);
    ASSERT_TRUE(failure) << static_cast<int>(other);
    EXPECT_EQ(failure->rank(), other == Other::kWaits           ? 1
                               : other == Other::kMovesMessages ? -1
                                                                : 0);
  }
}

pb::Cause rank_1_at(int64_t step) {
  pb::Cause f = cause("what: 'x' rank: 1");
  f.set_step(step);
  return f;
}

pb::Cause not_started() {
  return cause("what: 'x' rank: 1 at_start: true before_training: true");
}

FailureVerdict account_failure(const pb::Cause& f, const pb::Elastic& e,
                               int64_t last_finished, pb::Durable* d,
                               Consequence c = Consequence::kNone) {
  count_failure(f, last_finished, d->assignment().source().step(),
                d->mutable_budget());
  return judge_failure(f, e, c, d->assignment().source(), d->host_faults(),
                       d->mutable_budget());
}

TEST(FailureBudget, GivesUpAfterTheSameFailureSeveralTimes) {
  pb::Durable d;
  const pb::Cause f = cause("what: 'x' rank: 1 worker: 'a' step: 7");
  EXPECT_FALSE(account_failure(f, elastic(), 0, &d).give_up);
  EXPECT_FALSE(account_failure(f, elastic(), 0, &d).give_up);
  EXPECT_TRUE(account_failure(f, elastic(), 0, &d).give_up);
  reset_failures(d.mutable_budget());
  EXPECT_FALSE(account_failure(f, elastic(), 0, &d).give_up);
}

TEST(FailureBudget, GivesUpWithoutProgressAndBacksOffBefore) {
  for (const int64_t limit : {1, 5}) {
    pb::Durable d;
    pb::Elastic e = elastic();
    e.set_max_failures_without_progress(limit);
    std::vector<int64_t> waits;
    for (int64_t step = 1; step <= limit; ++step) {
      const auto v = account_failure(rank_1_at(step), e, 0, &d);
      EXPECT_EQ(v.give_up, step == limit);
      waits.push_back(v.backoff_ms);
    }
    EXPECT_EQ(waits, limit == 1 ? std::vector<int64_t>{0}
                                : (std::vector<int64_t>{0, 0, 250, 500, 0}));
  }
}

// Step 1000 was finished, and the job continued at 900.
TEST(FailureBudget, LostStepsThatAreMadeAgainAreProgress) {
  pb::Durable d;
  auto* source = d.mutable_assignment()->mutable_source();
  for (int64_t step = 900; step < 1000; step += 5) {
    source->set_step(step);
    EXPECT_FALSE(
        account_failure(rank_1_at(step + 5), elastic(), 1000, &d).give_up)
        << step;
  }
}

TEST(FailureBudget, GivesUpIfTheSameStepsAreLostAgainAndAgain) {
  pb::Durable d;
  auto* source = d.mutable_assignment()->mutable_source();
  for (int64_t setbacks = 0; setbacks <= 5; ++setbacks)
    for (const int64_t step : {950, 900}) {
      source->set_step(step);
      const auto v =
          account_failure(rank_1_at(1000 + setbacks), elastic(), 1000, &d);
      EXPECT_EQ(v.give_up, step == 900 && setbacks == 4) << setbacks;
      if (v.give_up) {
        EXPECT_EQ(v.reason,
                  "x (the state was lost 5 times without a newly finished "
                  "step)");
        return;
      }
    }
}

TEST(FailureBudget, ABadSourceIsNotTheSameFailure) {
  pb::Durable d;
  d.mutable_assignment()->mutable_source()->set_kind(pb::Source::CHECKPOINT);
  const pb::Cause f = cause("what: 'x' rank: 0 step: 7 exit_code: 65");
  for (int i = 0; i < 4; ++i) {
    const auto v = account_failure(f, elastic(), 0, &d);
    EXPECT_TRUE(v.bad_source);
    EXPECT_FALSE(v.give_up);
  }
}

TEST(FailureBudget, WaitsForRoomAtMostHalfAMinuteAtATime) {
  EXPECT_EQ(wait_for_storage_ms(1), 250);
  EXPECT_EQ(wait_for_storage_ms(2), 500);
  EXPECT_EQ(wait_for_storage_ms(100), 30'000);
}

// Hosts that fail to start one after another may all be at fault.
TEST(FailureBudget, OneHostAfterAnotherIsNotTheSameFailureAtTheStart) {
  const auto fail = [](Consequence c, pb::Durable* d) {
    pb::Cause f = not_started();
    f.add_hosts("h");
    return account_failure(f, elastic(), 0, d, c).give_up;
  };
  pb::Durable d;
  for (int i = 1; i <= 4; ++i) EXPECT_FALSE(fail(Consequence::kSuspected, &d));
  EXPECT_TRUE(fail(Consequence::kNone, &d));
  pb::Durable e;
  for (int i = 1; i <= 5; ++i)
    EXPECT_EQ(fail(Consequence::kSuspected, &e), i == 5) << "without progress";
  pb::Durable one;
  for (int i = 1; i <= 3; ++i) {
    suspect({.host = "h"}, {}, 0, 0, one.mutable_host_faults());
    EXPECT_EQ(fail(Consequence::kSuspected, &one), i == 3) << "always this one";
  }
}

// A rank that has not begun to train does not know its step.
TEST(FailureBudget, TheReasonSaysWhenTheSameFailureCame) {
  for (const bool before : {false, true}) {
    pb::Durable d;
    FailureVerdict v;
    pb::Cause f = rank_1_at(7);
    f.set_before_training(before);
    for (int i = 0; i < 3; ++i) v = account_failure(f, elastic(), 0, &d);
    EXPECT_TRUE(v.give_up);
    EXPECT_EQ(v.reason, before ? "x (the same failure 3 times before training "
                                 "began)"
                               : "x (the same failure 3 times at step 7)");
  }
}

TEST(FailureBudget, ARankThatCannotContinueEndsTheJobAtOnce) {
  pb::Durable d;
  const auto v = account_failure(cause("what: 'why' rank: 0 exit_code: 3"),
                                 elastic(), 0, &d);
  EXPECT_TRUE(v.give_up);
  EXPECT_EQ(v.reason, "why");
}

TEST(FailureBudget, AHostThatWasCordonedDoesNotEndTheJob) {
  pb::Durable d;
  for (const int code : {0, 1, 3, 65, 66}) {
    for (int i = 0; i < 10; ++i) {
      pb::Cause f = not_started();
      f.set_exit_code(code);
      const auto v =
          account_failure(f, elastic(), 0, &d, Consequence::kCordoned);
      EXPECT_FALSE(v.give_up) << code;
      EXPECT_FALSE(v.bad_source) << code;
      EXPECT_EQ(v.backoff_ms, 0);
    }
  }
  EXPECT_EQ(d.budget().failures(), 0);
}

TEST(FailureBudget, ARankThatCrashesInAStepOnManyHostsEndsTheJob) {
  const auto crash = [](int rank, int host, pb::Durable* d) {
    pb::Cause f = cause("what: 'x' step: 7 at_start: true");
    f.set_rank(rank);
    f.add_hosts("h" + std::to_string(host));
    return account_failure(f, elastic(), 0, d, Consequence::kCordoned).give_up;
  };
  pb::Durable d;
  for (int host = 1; host <= 5; ++host)
    for (int i = 0; i < 3; ++i)
      EXPECT_EQ(crash(1, host, &d), host == 5) << host;
  pb::Durable other;
  for (int host = 1; host <= 20; ++host)
    EXPECT_FALSE(crash(host % 3, host, &other)) << "the hosts are bad";
}

TEST(FailureBudget, FailuresThatOtherHostsCanAvoidAreNotCounted) {
  pb::Durable d;
  for (int i = 0; i < 20; ++i) {
    suspect({.host = "h" + std::to_string(i)}, {}, 0, 0,
            d.mutable_host_faults());
    const auto v = account_failure(not_started(), elastic(), 0, &d,
                                   Consequence::kOthersCanRun);
    EXPECT_FALSE(v.give_up);
    EXPECT_EQ(v.backoff_ms, i < 2 ? 0 : i < 4 ? 250 << (i - 2) : 1000);
  }
  EXPECT_EQ(d.budget().failures(), 0);
}

TEST(FailureBudget, TooLittleRoomRefusesOnlyASourceInMemory) {
  pb::Durable d;
  const pb::Cause f = cause("what: 'no room' rank: 0 exit_code: 66");
  EXPECT_FALSE(
      account_failure(f, elastic(), 0, &d, Consequence::kSuspected).give_up)
      << "tried again without replicas";
  const auto again = account_failure(f, elastic(), 0, &d);
  EXPECT_FALSE(again.give_up) << "there may be room later";
  EXPECT_FALSE(again.bad_source);
  EXPECT_TRUE(account_failure(f, elastic(), 0, &d).give_up);
  d.mutable_assignment()->mutable_source()->set_kind(pb::Source::MEMORY);
  reset_failures(d.mutable_budget());
  const auto v = account_failure(f, elastic(), 0, &d);
  EXPECT_FALSE(v.give_up);
  EXPECT_TRUE(v.bad_source);
}

}  // namespace
}  // namespace remesh::core
