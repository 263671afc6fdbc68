// Membership: joins, losses, returns, and queries of the roster.
#include "coordinator/core/roster.h"

#include <gtest/gtest.h>

#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

using Kind = Roster::Change::Kind;

constexpr int64_t kDeadMs = 2000;

TEST(Roster, DropsReportsThatAreNotNewer) {
  Roster roster;
  const pb::Durable d;
  ASSERT_TRUE(roster.on_report(report("a", 2), d, kSilentMs, 0));
  EXPECT_FALSE(roster.on_report(report("a", 2), d, kSilentMs, 1));
  EXPECT_FALSE(roster.on_report(report("a", 1), d, kSilentMs, 1));
  EXPECT_FALSE(roster.on_report(report("", 1), d, kSilentMs, 1));
  ASSERT_TRUE(roster.on_report(report("a", 1, 2), d, kSilentMs, 2));
  EXPECT_FALSE(roster.on_report(report("a", 9, 1), d, kSilentMs, 3))
      << "of an older incarnation";
}

TEST(Roster, ReportsOfAForgottenWorkerStayStale) {
  Roster roster;
  const pb::Durable d;
  roster.on_report(report("a", 5), d, kSilentMs, 0);
  roster.expire(d, kDeadMs, kDeadMs + 1);
  ASSERT_EQ(roster.find("a"), nullptr);
  EXPECT_FALSE(roster.on_report(report("a", 5), d, kSilentMs, 9000));
  EXPECT_TRUE(roster.on_report(report("a", 6), d, kSilentMs, 9000));
}

TEST(Roster, ANewIncarnationProvesTheOldOneDead) {
  Roster roster;
  const pb::Durable d;
  roster.on_report(report("a", 1, 1), d, kSilentMs, 0);
  const auto changes = roster.on_report(report("a", 1, 2), d, kSilentMs, 10);
  ASSERT_TRUE(changes);
  ASSERT_EQ(changes->size(), 2u);
  EXPECT_EQ((*changes)[0].kind, Kind::kLost);
  EXPECT_EQ((*changes)[0].incarnation, 1u);
  EXPECT_EQ((*changes)[1].kind, Kind::kJoined);
  EXPECT_FALSE(roster.considers_live("a", 1));
  EXPECT_TRUE(roster.considers_live("a", 2));
}

TEST(Roster, SilenceAndABrokenConnectionAreDeath) {
  for (const bool disconnected : {false, true}) {
    Roster roster;
    const pb::Durable d;
    roster.on_report(report("a", 1), d, kSilentMs, 0);
    if (disconnected) roster.on_disconnect("a", 10);
    const int64_t limit = disconnected ? 10 + 250 : kDeadMs;
    EXPECT_TRUE(roster.expire(d, kDeadMs, limit).empty());
    const auto changes = roster.expire(d, kDeadMs, limit + 1);
    ASSERT_EQ(changes.size(), 1u);
    EXPECT_EQ(changes[0].kind, Kind::kLost);
    EXPECT_EQ(roster.last_loss_ms(), limit + 1);
    EXPECT_TRUE(roster.none_alive());
  }
}

TEST(Roster, AReportAfterADisconnectClearsIt) {
  Roster roster;
  const pb::Durable d;
  roster.on_report(report("a", 1), d, kSilentMs, 0);
  roster.on_disconnect("a", 10);
  roster.on_report(report("a", 2), d, kSilentMs, 20);
  EXPECT_TRUE(roster.expire(d, kDeadMs, 1000).empty());
}

TEST(Roster, KeepsADeadParticipantUntilItsGenerationEnds) {
  Roster roster;
  pb::Durable d = running({"a"});
  roster.on_report(running_report("a", 1, 0, 3), d, kSilentMs, 0);
  roster.expire(d, kDeadMs, kDeadMs + 1);
  ASSERT_NE(roster.find("a"), nullptr);
  EXPECT_EQ(roster.find_alive("a"), nullptr);
  const auto back =
      roster.on_report(running_report("a", 2, 0, 4), d, kSilentMs, 2100);
  ASSERT_TRUE(back);
  EXPECT_EQ((*back)[0].kind, Kind::kReturned);
  roster.expire(d, kDeadMs, 9000);
  d.set_phase(pb::Durable::WAITING);
  roster.expire(d, kDeadMs, 9001);
  EXPECT_EQ(roster.find("a"), nullptr);
}

TEST(Roster, NobodyIsSilentWhileTheCoordinatorIsAbsent) {
  Roster roster;
  const pb::Durable d;
  roster.on_report(report("a", 1), d, kSilentMs, 0);
  roster.on_own_absence(60'000);
  EXPECT_TRUE(roster.expire(d, kDeadMs, 60'500).empty());
}

TEST(Roster, AdoptedParticipantsHaveUntilThenToReport) {
  Roster roster;
  const pb::Durable d = running({"a", "b"});
  roster.adopt(d, 3000);
  EXPECT_FALSE(roster.all_heard());
  EXPECT_TRUE(roster.expire(d, kDeadMs, 3000 + kDeadMs).empty());
  EXPECT_EQ(roster.expire(d, kDeadMs, 3001 + kDeadMs).size(), 2u);
}

TEST(Roster, AStepIsCommittedWhenEveryRankCommittedIt) {
  Roster roster;
  const pb::Durable d = running({"a", "b"});
  EXPECT_EQ(roster.committed_step(d), -1);
  roster.on_report(running_report("a", 1, 0, 7), d, kSilentMs, 0);
  EXPECT_EQ(roster.committed_step(d), -1) << "rank 1 has not reported";
  roster.on_report(running_report("b", 1, 1, 5), d, kSilentMs, 0);
  EXPECT_EQ(roster.committed_step(d), 5);
  pb::Report old = running_report("b", 2, 1, 9);
  old.set_generation(0);
  roster.on_report(old, d, kSilentMs, 1);
  EXPECT_EQ(roster.committed_step(d), -1) << "of another generation";
}

TEST(Roster, EverybodyIsPreparedWhenNoOlderRankIsAlive) {
  Roster roster;
  const pb::Durable d = running({"a"}, pb::Durable::PREPARING);
  pb::Report a = report("a", 1);
  a.set_generation(1);
  a.set_state(pb::Report::PREPARED);
  roster.on_report(a, d, kSilentMs, 0);
  EXPECT_TRUE(roster.all_prepared(d));
  pb::Report outsider = report("z", 1);
  roster.on_report(outsider, d, kSilentMs, 0);
  EXPECT_FALSE(roster.all_prepared(d)) << "z is not fenced";
  outsider.set_seq(2);
  outsider.set_generation(1);
  outsider.set_busy(true);
  roster.on_report(outsider, d, kSilentMs, 1);
  EXPECT_FALSE(roster.all_prepared(d)) << "z has a rank alive";
  outsider.set_seq(3);
  outsider.set_busy(false);
  roster.on_report(outsider, d, kSilentMs, 2);
  EXPECT_TRUE(roster.all_prepared(d));
}

TEST(Roster, ProgressDuringASilenceIsUnknown) {
  Roster roster;
  const pb::Durable d = running({"a"});
  roster.on_report(running_report("a", 1, 0, 3, 77), d, kSilentMs, 100);
  roster.on_report(running_report("a", 2, 0, 3, 77), d, kSilentMs, 200);
  EXPECT_EQ(roster.find("a")->progress.at(0).since_ms, 100);
  roster.on_report(running_report("a", 3, 0, 3, 77), d, kSilentMs, 900);
  EXPECT_EQ(roster.find("a")->progress.at(0).since_ms, 800);
}

}  // namespace
}  // namespace remesh::core
