// Cordons: what failures count, for how long a host is cordoned, and what
// clears the count.
#include "coordinator/core/cordons.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "proto/base/exit_code.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

pb::Elastic elastic() {
  pb::Elastic e;
  e.set_max_same_failures(3);
  return e;
}

struct Fixture {
  Roster roster;
  pb::Durable durable = running({"a", "b"});

  Blame blame(const Failure& f, bool others_can_run = true) const {
    return blame_for(f, {.roster = roster, .durable = durable}, elastic(),
                     others_can_run);
  }
};

Failure on_host(const std::string& host) {
  return {.what = "x", .rank = 1, .worker = "w", .hosts = {host}};
}

TEST(Blame, CountsFailuresToStartOnTheHost) {
  Fixture f;
  Failure failure = on_host("h");
  EXPECT_TRUE(f.blame(failure).hosts.empty()) << "it trained";
  failure.at_start = true;
  EXPECT_EQ(f.blame(failure).hosts, std::vector<std::string>{"h"});
  EXPECT_EQ(f.blame(failure).enough, 2);
  EXPECT_EQ(f.blame(failure, /*others_can_run=*/false).enough, 3);
  failure.rank = -1;
  EXPECT_EQ(f.blame(failure).enough, 3) << "a daemon was restarted";
  failure.hosts.clear();
  EXPECT_TRUE(f.blame(failure).hosts.empty()) << "nobody is at fault";
}

TEST(Blame, ARepeatedFailureIsBlamedOnTheHost) {
  Fixture f;
  f.durable.set_same_failures(2);
  EXPECT_TRUE(f.blame(on_host("h")).hosts.empty());
  f.durable.set_same_failures(3);
  EXPECT_EQ(f.blame(on_host("h")).enough, 1);
}

TEST(Blame, LossesBySilenceAreRememberedLonger) {
  Fixture f;
  Failure failure = on_host("h");
  failure.rank = -1;
  failure.silent = true;
  EXPECT_EQ(f.blame(failure).enough, 2);
  EXPECT_GT(f.blame(failure).remembered_s, 0);
  EXPECT_TRUE(f.blame(failure, false).hosts.empty());
}

TEST(Blame, AllHostsWhoseRanksFailedToStartAreCounted) {
  Fixture f;
  Failure failure = on_host("h");
  failure.hosts.push_back("i");
  failure.at_start = true;
  EXPECT_EQ(f.blame(failure).hosts, failure.hosts);
  EXPECT_TRUE(f.blame(failure).hosts_alone);
  EXPECT_FALSE(f.blame(failure, /*others_can_run=*/false).hosts_alone);
}

TEST(Blame, WithoutASourceThatCodeIsBlamedOnTheHost) {
  Fixture f;
  Failure failure = on_host("h");
  failure.exit_code = kExitBadSource;
  failure.at_start = true;
  failure.hosts.push_back("i");
  EXPECT_EQ(f.blame(failure).enough, 2);
}

constexpr int64_t kNever = INT64_MAX;

TEST(Blame, ASourceThatTwoHostsCannotLoadIsBad) {
  Fixture f;
  f.durable.mutable_assignment()->mutable_source()->set_kind(
      pb::Source::CHECKPOINT);
  Failure failure = on_host("h");
  failure.exit_code = kExitBadSource;
  EXPECT_EQ(f.blame(failure).enough, 1);
  failure.hosts.push_back("i");
  EXPECT_EQ(f.blame(failure).enough, kNever);
  failure.hosts.pop_back();
  cordon("i", "", "rank 0 on worker i: killed by signal 9 (SIGKILL)", 0,
         &f.durable);
  EXPECT_EQ(f.blame(failure).enough, 1) << "that was something else";
  cordon("h", "", "rank 0 on worker w: exit code 65: no such file", 0,
         &f.durable);
  EXPECT_EQ(f.blame(failure).enough, 1) << "it is the same host";
  cordon("i", "", "rank 0 on worker i: exit code 65: no such file", 0,
         &f.durable);
  EXPECT_EQ(f.blame(failure).enough, kNever);
}

TEST(Blame, NoHostIsBlamedForAnIncompleteSource) {
  Fixture f;
  pb::Source* source = f.durable.mutable_assignment()->mutable_source();
  source->set_kind(pb::Source::MEMORY);
  source->add_states()->set_worker("gone");
  Failure failure = on_host("h");
  failure.exit_code = kExitBadSource;
  EXPECT_TRUE(f.blame(failure).hosts.empty());
}

TEST(Blame, AllHostsThatCannotContinueAreNamed) {
  Fixture f;
  Failure failure = on_host("h");
  failure.hosts.push_back("i");
  failure.exit_code = kExitFailed;
  EXPECT_EQ(f.blame(failure).hosts, failure.hosts);
  EXPECT_EQ(f.blame(failure).enough, 1);
  failure.exit_code = kExitNoRoom;
  EXPECT_EQ(f.blame(failure).hosts, failure.hosts);
  EXPECT_EQ(f.blame(failure).enough, 2) << "once without replicas";
  suspect("h", "", 0, 0, &f.durable);
  suspect("h", "", 0, 0, &f.durable);
  EXPECT_EQ(f.blame(failure, false).hosts, failure.hosts)
      << "they have too little room for any state";
  f.durable.mutable_assignment()->mutable_source()->set_kind(
      pb::Source::MEMORY);
  EXPECT_TRUE(f.blame(failure, false).hosts.empty()) << "an older state may do";
}

TEST(Cordon, ComparesFailuresByTheirExitCodes) {
  const auto alike = [](const std::string& reason, int exit_code) {
    pb::Cordon c;
    c.set_reason("rank 0 on worker a: " + reason);
    return is_alike(c, {.what = "", .exit_code = exit_code});
  };
  EXPECT_TRUE(alike("exit code 3: no data", 3));
  EXPECT_TRUE(alike("exit code 3", 3));
  EXPECT_FALSE(alike("exit code 33: what", 3));
  EXPECT_FALSE(alike("exit code 66: no room", 3));
  EXPECT_FALSE(alike("killed by signal 9 (SIGKILL)", 66));
  EXPECT_FALSE(alike("exit code 3: no data", 0));
  EXPECT_TRUE(alike("exit code 1: what", 0));
  EXPECT_TRUE(alike("killed by signal 9 (SIGKILL)", 1));
}

// A host is at fault from its third failure, also when its cordon has ended.
TEST(Cordon, AHostThatFailsAgainAfterItsCordonIsBlamed) {
  pb::Durable d;
  const Failure like{.what = "", .exit_code = 3};
  for (int i = 1; i <= 3; ++i) {
    suspect("h", "", 0, 0, &d, "rank 0 on worker a: exit code 3: no data");
    EXPECT_EQ(failed_alike(d, "h", like), i == 3);
    EXPECT_EQ(hosts_failed_alike(d, like), std::set<std::string>{"h"});
  }
  EXPECT_FALSE(failed_alike(d, "h", {.what = "", .exit_code = 66}));
  EXPECT_FALSE(failed_alike(d, "i", like));
  cordon("i", "", "rank 0 on worker i: exit code 3: no data", 0, &d);
  EXPECT_TRUE(failed_alike(d, "i", like));
}

TEST(Cordon, LastsTwiceAsLongAfterEachFailure) {
  pb::Durable d;
  double now_s = 1000;
  for (const double expected : {10.0, 20.0, 40.0, 80.0}) {
    suspect("h", "", 0, now_s, &d);
    cordon("h", "", "x", now_s, &d);
    EXPECT_TRUE(is_cordoned(d, "h"));
    EXPECT_EQ(remaining_s(d.cordons(0), now_s), expected);
    EXPECT_TRUE(end_cordons(now_s + expected - 1, &d).empty());
    EXPECT_EQ(end_cordons(now_s + expected, &d).size(), 1U);
    EXPECT_FALSE(is_cordoned(d, "h"));
    now_s += expected;
  }
  for (int i = 0; i < 20; ++i) suspect("h", "", 0, now_s, &d);
  cordon("h", "", "x", now_s, &d);
  EXPECT_EQ(remaining_s(d.cordons(0), now_s), 3600);
}

TEST(Cordon, AClockThatIsSetBackDoesNotMakeItLonger) {
  pb::Durable d;
  cordon("h", "", "x", 1e9, &d);
  EXPECT_EQ(remaining_s(d.cordons(0), 5e8), 10);
  EXPECT_TRUE(end_cordons(5e8, &d).empty());
  EXPECT_EQ(end_cordons(5e8 + 10, &d).size(), 1U);
}

TEST(Cordon, AStepResetsTheCountsOfItsHostsOnly) {
  pb::Durable d;
  for (const char* host : {"a", "b"}) suspect(host, "", 0, 0, &d);
  suspect("a", "c", 0, 0, &d);
  EXPECT_TRUE(clear_suspects({"a"}, 1, &d));
  EXPECT_EQ(failures_of(d, "a"), 0);
  EXPECT_EQ(failures_of(d, "b"), 1);
  EXPECT_EQ(failures_of(d, "c", "a"), 1) << "the link was not used";
  EXPECT_FALSE(clear_suspects({"a"}, 1, &d));
  EXPECT_TRUE(clear_suspects({"a", "c"}, 1, &d));
  EXPECT_EQ(failures_of(d, "a", "c"), 0);
}

TEST(Cordon, LossesAreCountedForAWhileDespiteFinishedSteps) {
  pb::Durable d;
  EXPECT_EQ(suspect("h", "", 300, 0, &d), 1);
  EXPECT_FALSE(clear_suspects({"h"}, 200, &d));
  EXPECT_EQ(suspect("h", "", 300, 200, &d), 2);
  EXPECT_EQ(suspect("h", "", 300, 600, &d), 1) << "long after";
}

TEST(Cordon, LiftingItResetsTheCount) {
  pb::Durable d;
  suspect("h", "", 0, 0, &d);
  suspect("h", "i", 0, 0, &d);
  EXPECT_FALSE(uncordon("h", &d)) << "not cordoned";
  suspect("h", "", 0, 0, &d);
  cordon("h", "", "why", 0, &d);
  EXPECT_EQ(cordon_reason(d, "h"), "why");
  EXPECT_NE(cordons_text(d).find("h (cordoned: why)"), std::string::npos);
  EXPECT_TRUE(uncordon("h", &d));
  EXPECT_EQ(d.suspects_size(), 0);
  EXPECT_EQ(cordons_text(d), "");
}

TEST(Cordon, ManyFailedHostsTakeBoundedMemory) {
  pb::Durable d;
  for (int i = 0; i < 1000; ++i) suspect("h" + std::to_string(i), "", 0, 0, &d);
  EXPECT_LE(d.suspects_size(), 256);
  EXPECT_EQ(failures_of(d, "h999"), 1);
  suspect("later", "", 0, 1e5, &d);
  EXPECT_EQ(d.suspects_size(), 1);
}

}  // namespace
}  // namespace remesh::core
