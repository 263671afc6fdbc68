// Membership: joins, losses, returns, and queries of the roster.
#include "coordinator/core/roster.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "tests/testing/expect.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

using Kind = Roster::MembershipChange::Kind;

constexpr int64_t kDeadMs = 2000;

class RosterTest : public testing::Test {
 protected:
  Roster roster_;
  const pb::Durable d_;  // before the first generation
};

TEST_F(RosterTest, DropsReportsThatAreNotNewer) {
  ASSERT_TRUE(roster_.on_report(report("a", 2), d_, kSilentMs, 0));
  EXPECT_FALSE(roster_.on_report(report("a", 2), d_, kSilentMs, 1));
  EXPECT_FALSE(roster_.on_report(report("a", 1), d_, kSilentMs, 1));
  EXPECT_FALSE(roster_.on_report(report("", 1), d_, kSilentMs, 1));
  ASSERT_TRUE(roster_.on_report(report("a", 1, 2), d_, kSilentMs, 2));
  EXPECT_FALSE(roster_.on_report(report("a", 9, 1), d_, kSilentMs, 3))
      << "of an older incarnation";
}

TEST_F(RosterTest, ReportsOfAForgottenWorkerStayStale) {
  roster_.on_report(report("a", 5), d_, kSilentMs, 0);
  roster_.expire(d_, kDeadMs, kDeadMs + 1);
  ASSERT_EQ(roster_.find("a"), nullptr);
  EXPECT_FALSE(roster_.on_report(report("a", 5), d_, kSilentMs, 9000));
  EXPECT_TRUE(roster_.on_report(report("a", 6), d_, kSilentMs, 9000));
}

TEST_F(RosterTest, ANewIncarnationProvesTheOldOneDead) {
  roster_.on_report(report("a", 1, 1), d_, kSilentMs, 0);
  const auto changes = roster_.on_report(report("a", 1, 2), d_, kSilentMs, 10);
  ASSERT_TRUE(changes);
  ASSERT_EQ(changes->size(), 2u);
  EXPECT_EQ((*changes)[0].kind, Kind::kLost);
  EXPECT_EQ((*changes)[0].incarnation, 1u);
  EXPECT_EQ((*changes)[1].kind, Kind::kJoined);
  EXPECT_FALSE(roster_.considers_live("a", 1));
  EXPECT_TRUE(roster_.considers_live("a", 2));
}

TEST_F(RosterTest, DeclaresDeathBySilenceOrABrokenConnection) {
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
    EXPECT_EQ(roster.last_lost_ms(), limit + 1);
    EXPECT_TRUE(roster.none_alive());
  }
}

TEST_F(RosterTest, AClosedConnectionIsDeathAfterTheConfiguredTime) {
  EXPECT_EQ(closed_after_ms(-1, 100), 100);
  EXPECT_EQ(closed_after_ms(-1, 2000), 250);
  EXPECT_EQ(closed_after_ms(-1, 3'600'000), 450'000);
  EXPECT_EQ(closed_after_ms(0, 2000), 0);
  EXPECT_EQ(closed_after_ms(3000, 2000), 2000);
  for (const int64_t configured : {-1, 0, 1500, 1'000'000}) {
    Roster roster;
    const pb::Durable d;
    roster.on_report(report("a", 1), d, kSilentMs, 0);
    roster.on_disconnect("a", 10);
    const int64_t limit =
        std::min(kDeadMs, 10 + closed_after_ms(configured, kDeadMs));
    EXPECT_TRUE(roster.expire(d, kDeadMs, limit, configured).empty());
    EXPECT_EQ(roster.expire(d, kDeadMs, limit + 1, configured).size(), 1u);
  }
}

// Until the coordinator itself said that it may go, it may still be needed.
TEST_F(RosterTest, ADismissedWorkerIsGoneWithItsConnection) {
  for (const bool sent_away : {false, true}) {
    Roster roster;
    const pb::Durable d;
    pb::Report r = report("a", 1);
    r.set_leaving(true);
    roster.on_report(r, d, kSilentMs, 0);
    if (sent_away)
      roster.note_directive("a", {.goal = pb::Directive::LEAVE}, 5);
    roster.on_disconnect("a", 10);
    EXPECT_EQ(roster.expire(d, kDeadMs, 20).size(), sent_away ? 1u : 0u);
  }
}

// What admission makes of it.
pb::Report on_machine(const std::string& worker, uint64_t id,
                      const Roster& roster, uint64_t seq = 1) {
  pb::Report r = report(worker, seq);
  r.set_host("node");
  r.set_host_id(id);
  r.set_host(roster.host_of(r));
  return r;
}

TEST_F(RosterTest, TwoMachinesOfOneNameAreTwoHosts) {
  const auto join = [&](const std::string& worker, uint64_t id) {
    const pb::Report r = on_machine(worker, id, roster_);
    EXPECT_TRUE(roster_.on_report(r, d_, kSilentMs, 0));
    return r.host();
  };
  EXPECT_EQ(join("a", 0x1111), "node");
  EXPECT_EQ(join("b", 0x5'2222'3333), "node-22223333");
  EXPECT_EQ(join("c", 0x1111), "node");
  EXPECT_EQ(join("d", 0x5'2222'3333), "node-22223333");
  // It keeps the name, and those that come later have it too.
  for (const char* gone : {"a", "c"}) roster_.on_disconnect(gone, 0, "gone");
  (void)roster_.expire(d_, kDeadMs, 10);
  ASSERT_EQ(roster_.members().size(), 2u);
  EXPECT_EQ(on_machine("b", 0x5'2222'3333, roster_, 2).host(), "node-22223333");
  EXPECT_EQ(join("f", 0x5'2222'3333), "node-22223333");
  EXPECT_EQ(join("g", 0x1111), "node");
}

TEST_F(RosterTest, AnAdoptedWorkerKeepsTheNameOfItsHost) {
  pb::Durable d = running({"a", "b"});
  for (int i : {0, 1}) {
    d.mutable_participants(i)->set_host(i == 0 ? "node" : "node-00000002");
    d.mutable_participants(i)->set_host_id(static_cast<uint64_t>(i) + 1);
  }
  roster_.adopt(d, 0);
  EXPECT_EQ(on_machine("b", 2, roster_).host(), "node-00000002");
  EXPECT_EQ(on_machine("a", 1, roster_).host(), "node");
  EXPECT_EQ(on_machine("c", 2, roster_).host(), "node-00000002");
}

// Reports every 100 ms until `until_ms`; returns the losses.
Roster::Changes report_until(Roster* roster, const pb::Durable& d,
                             pb::Report* r, int64_t from_ms, int64_t until_ms) {
  Roster::Changes lost;
  for (int64_t now = from_ms; now <= until_ms; now += 100) {
    r->set_seq(r->seq() + 1);
    roster->on_report(*r, d, kSilentMs, now);
    for (auto& c : roster->expire(d, kDeadMs, now)) lost.push_back(c);
  }
  return lost;
}

TEST_F(RosterTest, AMemberThatDoesNotEndItsRanksIsGivenUpMeanwhile) {
  const pb::Durable d = running({"a"}, pb::Durable::ABORTING);
  pb::Report r = running_report("a", 1, 0, 3);
  r.set_busy(true);
  EXPECT_TRUE(report_until(&roster_, d, &r, 0, kAwaitedMs).empty());
  EXPECT_FALSE(roster_.all_quiesced(d));
  EXPECT_EQ(roster_.awaited(d, kAwaitedMs).text,
            "waiting for a on host-a to end its ranks");
  const auto lost =
      report_until(&roster_, d, &r, kAwaitedMs + 100, 2 * kAwaitedMs);
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_HAS(lost[0].detail, "did not end its ranks");
  EXPECT_TRUE(roster_.all_quiesced(d));
  EXPECT_EQ(roster_.find_alive("a"), nullptr);
  EXPECT_TRUE(roster_.find("a")->reachable()) << "it still has to be fenced";
  r.set_seq(r.seq() + 1);
  r.set_busy(false);
  r.set_state(pb::Report::QUIESCED);
  const auto back = roster_.on_report(r, d, kSilentMs, 2 * kAwaitedMs + 100);
  ASSERT_TRUE(back);
  ASSERT_EQ(back->size(), 1u);
  EXPECT_EQ((*back)[0].kind, Kind::kReturned);
  EXPECT_NE(roster_.find_alive("a"), nullptr);
}

TEST_F(RosterTest, EveryPhaseWaitsForALiveMemberWithinALimit) {
  using Phase = pb::Durable::Phase;
  for (const Phase phase :
       {pb::Durable::WAITING, pb::Durable::PREPARING, pb::Durable::RUNNING,
        pb::Durable::FINISHING, pb::Durable::ABORTING}) {
    Roster roster;
    pb::Durable d = running({"a"}, phase);
    d.set_state_job(7);
    pb::Report r = report("a", 1);  // of no generation
    if (phase == pb::Durable::FINISHING) {
      r.set_generation(1);
      add_rank(&r, 0)->set_exited(true);
      r.set_state(pb::Report::RUNNING);
    }
    EXPECT_EQ(report_until(&roster, d, &r, 0, kAwaitedMs).size(), 0u);
    EXPECT_EQ(report_until(&roster, d, &r, kAwaitedMs, kAwaitedMs + 200).size(),
              1u)
        << phase;
  }
}

TEST_F(RosterTest, AMemberThatIsReadyForAMomentOnlyIsGivenUp) {
  const pb::Durable d = running({"a"}, pb::Durable::PREPARING);
  roster_.on_report(report("a", 1), d, kSilentMs, 0);
  int64_t given_up_ms = -1;
  for (int64_t now = 100; now < 2 * kAwaitedMs && given_up_ms < 0; now += 100) {
    pb::Report r = report("a", 1 + static_cast<uint64_t>(now));
    r.set_generation(1);
    // Ready for a second of ten.
    if (now % 10'000 < 1000)
      r.set_state(pb::Report::PREPARED);
    else
      r.set_busy(true);
    roster_.on_report(r, d, kSilentMs, now);
    if (!roster_.expire(d, kDeadMs, now).empty()) given_up_ms = now;
  }
  EXPECT_GT(given_up_ms, kAwaitedMs);
  EXPECT_HAS(roster_.find("a")->death, "end its older ranks");
}

// Otherwise any worker could end every generation.
TEST_F(RosterTest, OnlyAMemberWithRanksStartsEarly) {
  pb::Durable d = running({"a", "b"}, pb::Durable::PREPARING);
  d.mutable_assignment()->mutable_workers()->DeleteSubrange(1, 1);
  d.mutable_assignment()->mutable_ranks()->DeleteSubrange(1, 1);
  for (const char* name : {"b", "a"}) {
    pb::Report r = report(name, 1);
    r.set_generation(1);
    r.set_state(pb::Report::RUNNING);
    roster_.on_report(r, d, kSilentMs, 0);
    EXPECT_EQ(roster_.started_early(d, /*late=*/false),
              std::string(name) == "a" ? "a" : "");
  }
}

TEST_F(RosterTest, StatesOfThoseWhoJoinedLateAreNotAwaited) {
  pb::Report a = report("a", 1);
  merge_text("has_inventory: true state: IDLE", &a);
  roster_.on_report(a, d_, kSilentMs, 0);
  roster_.on_report(report("b", 1), d_, kSilentMs, 100);
  EXPECT_FALSE(roster_.inventories_known(0, 100));
  EXPECT_TRUE(roster_.inventories_known(0, 99));
}

TEST_F(RosterTest, ASilentMemberIsNotAwaited) {
  constexpr int64_t kLong = 10 * kAwaitedMs;
  const pb::Durable d = running({"a"}, pb::Durable::ABORTING);
  roster_.on_report(running_report("a", 1, 0, 3), d, kSilentMs, 0);
  roster_.expire(d, kLong, 0);
  EXPECT_TRUE(roster_.expire(d, kLong, 2 * kAwaitedMs).empty());
}

TEST_F(RosterTest, AMemberWithoutSlotsDelaysNothing) {
  const pb::Durable d = running({"a"}, pb::Durable::PREPARING);
  pb::Report a = report("a", 1);
  a.set_generation(1);
  a.set_state(pb::Report::PREPARED);
  roster_.on_report(a, d, kSilentMs, 0);
  pb::Report none = report("z", 1);
  none.set_slots(0);
  roster_.on_report(none, d, kSilentMs, 0);
  EXPECT_TRUE(roster_.all_prepared(d, INT64_MAX));
  none.set_seq(2);
  none.set_busy(true);
  roster_.on_report(none, d, kSilentMs, 1);
  EXPECT_FALSE(roster_.all_prepared(d, INT64_MAX)) << "it still has a rank";
}

TEST_F(RosterTest, AWorkerLeavesOnceHoweverOftenItSaysSo) {
  size_t told = 0;
  for (uint64_t seq = 1; seq <= 6; ++seq) {
    pb::Report r = report("a", seq);
    r.set_leaving(seq % 2 == 0);
    const auto changes = roster_.on_report(r, d_, kSilentMs, 10);
    ASSERT_TRUE(changes);
    for (const auto& c : *changes) told += c.kind == Kind::kLeaving ? 1 : 0;
  }
  EXPECT_EQ(told, 1U);
}

TEST_F(RosterTest, AReportAfterADisconnectClearsIt) {
  roster_.on_report(report("a", 1), d_, kSilentMs, 0);
  roster_.on_disconnect("a", 10);
  roster_.on_report(report("a", 2), d_, kSilentMs, 20);
  EXPECT_TRUE(roster_.expire(d_, kDeadMs, 1000).empty());
}

TEST_F(RosterTest, KeepsADeadParticipantUntilItsGenerationEnds) {
  pb::Durable d = running({"a"});
  roster_.on_report(running_report("a", 1, 0, 3), d, kSilentMs, 0);
  roster_.expire(d, kDeadMs, kDeadMs + 1);
  ASSERT_NE(roster_.find("a"), nullptr);
  EXPECT_EQ(roster_.find_alive("a"), nullptr);
  const auto back =
      roster_.on_report(running_report("a", 2, 0, 4), d, kSilentMs, 2100);
  ASSERT_TRUE(back);
  EXPECT_EQ((*back)[0].kind, Kind::kReturned);
  roster_.expire(d, kDeadMs, 9000);
  d.set_phase(pb::Durable::WAITING);
  roster_.expire(d, kDeadMs, 9001);
  EXPECT_EQ(roster_.find("a"), nullptr);
}

TEST_F(RosterTest, NobodyIsSilentWhileTheCoordinatorIsAbsent) {
  roster_.on_report(report("a", 1), d_, kSilentMs, 0);
  roster_.on_own_absence(60'000);
  EXPECT_TRUE(roster_.expire(d_, kDeadMs, 60'500).empty());
}

// Silence on all hosts at once is put down to the coordinator's own network.
TEST_F(RosterTest, SilenceOnAllHostsKillsNobody) {
  const auto heard = [&](const std::string& name, uint64_t seq, int64_t ms) {
    return roster_.on_report(report(name, seq), d_, kSilentMs, ms);
  };
  heard("b", 1, 0);
  heard("a", 1, 900);
  const auto changes = roster_.expire(d_, kDeadMs, 900 + kDeadMs + 1);
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_EQ(changes[0].kind, Kind::kCutOff);
  const auto back = heard("a", 2, 6000);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->front().kind, Kind::kReconnected);
  heard("a", 3, 6000 + kDeadMs);
  EXPECT_TRUE(roster_.expire(d_, kDeadMs, 6000 + kDeadMs).empty())
      << "the other one had no time to be heard";
  EXPECT_FALSE(roster_.expire(d_, kDeadMs, 6000 + kDeadMs + 1).empty());
}

// A connection closed by a process that ended says that the network works.
TEST_F(RosterTest, AKilledWorkerIsNotPartOfTheSilence) {
  for (const bool others : {false, true}) {
    Roster roster;
    const pb::Durable d;
    for (const char* name : {"killed", "b", "c"}) {
      if (!others && *name == 'c') continue;
      roster.on_report(report(name, 1), d, kSilentMs, 0);
    }
    roster.on_report(report("killed", 2), d, kSilentMs, 900);
    roster.on_disconnect("killed", 950);
    const auto changes = roster.expire(d, kDeadMs, kDeadMs + 1);
    const auto lost = std::count_if(changes.begin(), changes.end(),
                                    [](const Roster::MembershipChange& c) {
                                      return c.kind == Kind::kLost;
                                    });
    // The silence of one host is that host's; of two, the coordinator's.
    EXPECT_EQ(lost, others ? 1 : 2);
    EXPECT_EQ(roster.find_alive("b") != nullptr, others);
    EXPECT_EQ(roster.find_alive("killed"), nullptr);
  }
}

// The coordinator's own network closed them: it does not matter how long that
// lasts.
TEST_F(RosterTest, ConnectionsThatAreClosedAtOnceKillNobody) {
  enum Case { kAll, kOneStays, kOneLater, kTheyLeave, kStop };
  for (const Case c : {kAll, kOneStays, kOneLater, kTheyLeave, kStop}) {
    Roster roster;
    pb::Durable d;
    d.mutable_stop()->set_asked(c == kStop);
    const auto hear = [&](const std::string& name, uint64_t seq, int64_t ms) {
      pb::Report r = report(name, seq);
      r.set_leaving(c == kTheyLeave);
      return roster.on_report(r, d, kSilentMs, ms);
    };
    for (const char* name : {"a", "b"}) hear(name, 1, 0);
    if (c == kOneStays) hear("c", 1, 300);
    roster.on_disconnect("a", 100);
    roster.on_disconnect("b", c == kOneLater ? 351 : 350);
    int lost = 0;
    for (int64_t ms = 100; ms <= 700; ms += 50)
      for (const auto& change : roster.expire(d, kDeadMs, ms))
        if (change.kind == Kind::kLost) ++lost;
    EXPECT_EQ(lost, c == kAll ? 0 : 2) << c;
    if (c != kAll) continue;
    EXPECT_EQ(roster.expire(d, kDeadMs, kDeadMs + 1).at(0).kind, Kind::kCutOff);
    EXPECT_TRUE(roster.expire(d, kDeadMs, 3'600'000).empty());
    EXPECT_EQ(hear("a", 2, 3'600'001)->front().kind, Kind::kReconnected);
    hear("a", 3, 3'600'001 + kDeadMs);
    EXPECT_TRUE(roster.expire(d, kDeadMs, 3'600'001 + kDeadMs).empty());
    EXPECT_FALSE(roster.expire(d, kDeadMs, 3'600'002 + kDeadMs).empty());
  }
}

// TCP connects again a while after the network is back, and the connections
// from before may end later still.
// As of a coordinator that was cut off and suspended meanwhile.
TEST_F(RosterTest, AConnectionThatIsClosedAgainKillsNobodyElse) {
  for (const char* name : {"a", "b"})
    roster_.on_report(report(name, 1), d_, kSilentMs, 0);
  for (const char* name : {"a", "b"}) roster_.on_disconnect(name, 100);
  EXPECT_TRUE(roster_.expire(d_, kDeadMs, 400).empty());
  roster_.on_own_absence(400);
  roster_.on_disconnect("a", 800);
  EXPECT_TRUE(roster_.expire(d_, kDeadMs, 800).empty());
}

TEST_F(RosterTest, ConnectionsThatEndAfterACutOffKillNobody) {
  const pb::Durable d = running({"a", "b"});
  for (const char* name : {"a", "b"})
    roster_.on_report(report(name, 1), d, kSilentMs, 0);
  const int64_t back = 2 * kDeadMs;
  EXPECT_EQ(roster_.expire(d, kDeadMs, back).at(0).kind, Kind::kCutOff);
  roster_.on_report(report("b", 2), d, kSilentMs, back);
  roster_.on_disconnect("a", back + 10);
  EXPECT_TRUE(roster_.expire(d, kDeadMs, back + kDeadMs / 2).empty());
  roster_.on_report(report("a", 2), d, kSilentMs, back + kDeadMs / 2);
  roster_.on_report(report("b", 3), d, kSilentMs, back + kDeadMs / 2);
  // Once it is heard, the end of its connection counts.
  roster_.on_disconnect("a", back + kDeadMs / 2);
  EXPECT_EQ(roster_.expire(d, kDeadMs, back + kDeadMs).size(), 1u);
}

TEST_F(RosterTest, AStoppingJobWaitsForTheCutOffForALimitedTime) {
  pb::Durable d;
  for (const char* name : {"a", "b"})
    roster_.on_report(report(name, 1), d, kSilentMs, 0);
  EXPECT_EQ(roster_.expire(d, kDeadMs, 100 * kDeadMs).size(), 1u) << "alone";
  d.mutable_stop()->set_asked(true);
  EXPECT_EQ(roster_.expire(d, kDeadMs, 100 * kDeadMs).size(), 2u) << "lost";
}

TEST_F(RosterTest, AdoptedParticipantsHaveTimeToReport) {
  const pb::Durable one = running({"a"});
  roster_.adopt(one, 3000);
  EXPECT_FALSE(roster_.all_heard());
  EXPECT_TRUE(roster_.expire(one, kDeadMs, 3000 + kDeadMs).empty());
  EXPECT_EQ(roster_.expire(one, kDeadMs, 3001 + kDeadMs).at(0).kind,
            Kind::kLost);
  // If none of several hosts reports, it is cut off.
  const pb::Durable two = running({"a", "b"});
  roster_.adopt(two, 3000);
  const auto changes = roster_.expire(two, kDeadMs, 3001 + kDeadMs);
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_EQ(changes[0].kind, Kind::kCutOff);
}

TEST_F(RosterTest, AStepIsCommittedWhenEveryRankCommittedIt) {
  const pb::Durable d = running({"a", "b"});
  EXPECT_EQ(roster_.committed_step(d), -1);
  roster_.on_report(running_report("a", 1, 0, 7), d, kSilentMs, 0);
  EXPECT_EQ(roster_.committed_step(d), -1) << "rank 1 has not reported";
  roster_.on_report(running_report("b", 1, 1, 5), d, kSilentMs, 0);
  EXPECT_EQ(roster_.committed_step(d), 5);
  pb::Report old = running_report("b", 2, 1, 9);
  old.set_generation(0);
  roster_.on_report(old, d, kSilentMs, 1);
  EXPECT_EQ(roster_.committed_step(d), -1) << "of another generation";
}

TEST_F(RosterTest, TheSlowestLinkCountsIfItWasMeasured) {
  const pb::Durable d = running({"a", "b", "c"});
  const double inf = std::numeric_limits<double>::infinity();
  uint64_t seq = 0;
  const auto slowest = [&](double a, double b, double c) {
    ++seq;
    int rank = 0;
    for (const double link : {a, b, c}) {
      pb::Report r = running_report(std::string(1, "abc"[rank]), seq, rank, 1);
      r.mutable_ranks(0)->set_link_bytes_per_s(link);
      roster_.on_report(r, d, kSilentMs, 0);
      ++rank;
    }
    return roster_.link_bytes_per_s(1);
  };
  EXPECT_EQ(slowest(0, 0, 0), 0);
  EXPECT_EQ(slowest(3e6, 2e6, 5e6), 2e6);
  EXPECT_EQ(slowest(3e6, 0, 5e6), 3e6);
  EXPECT_EQ(slowest(std::nan(""), -inf, 5e6), 5e6);
  EXPECT_EQ(slowest(inf, 999, 5e6), 5e6);
  EXPECT_EQ(roster_.link_bytes_per_s(2), 0) << "of another generation";
}

TEST_F(RosterTest, AllArePreparedWhenNoOlderRankIsAlive) {
  const pb::Durable d = running({"a"}, pb::Durable::PREPARING);
  pb::Report a = report("a", 1);
  a.set_generation(1);
  a.set_state(pb::Report::PREPARED);
  roster_.on_report(a, d, kSilentMs, 0);
  EXPECT_TRUE(roster_.all_prepared(d, INT64_MAX));
  pb::Report outsider = report("z", 1);
  roster_.on_report(outsider, d, kSilentMs, 0);
  EXPECT_FALSE(roster_.all_prepared(d, INT64_MAX)) << "z is not fenced";
  EXPECT_TRUE(roster_.all_prepared(d, -1)) << "z joined too late";
  outsider.set_seq(2);
  outsider.set_generation(1);
  outsider.set_busy(true);
  roster_.on_report(outsider, d, kSilentMs, 1);
  EXPECT_FALSE(roster_.all_prepared(d, INT64_MAX)) << "z has a rank alive";
  outsider.set_seq(3);
  outsider.set_busy(false);
  roster_.on_report(outsider, d, kSilentMs, 2);
  EXPECT_TRUE(roster_.all_prepared(d, INT64_MAX));
}

TEST_F(RosterTest, ALongSilenceHardlyCountsAsTimeWithoutProgress) {
  const pb::Durable d = running({"a"});
  roster_.on_report(running_report("a", 1, 0, 3, 77), d, kSilentMs, 100);
  roster_.on_report(running_report("a", 2, 0, 3, 77), d, kSilentMs, 200);
  EXPECT_EQ(roster_.find("a")->progress.at(0).since_ms, 100);
  roster_.on_report(running_report("a", 3, 0, 3, 77), d, kSilentMs, 900);
  EXPECT_EQ(roster_.find("a")->progress.at(0).since_ms, 300);
  // A hang is found even if its worker is always late.
  int64_t now_ms = 900;
  for (uint64_t seq = 4; seq < 104; ++seq)
    roster_.on_report(running_report("a", seq, 0, 3, 77), d, kSilentMs,
                      now_ms += 1000);
  EXPECT_EQ(now_ms - roster_.find("a")->progress.at(0).since_ms,
            600 + 100 * kSilentMs);
}

}  // namespace
}  // namespace remesh::core
