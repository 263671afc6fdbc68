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
  f.durable.mutable_budget()->set_same_failures(2);
  EXPECT_TRUE(f.blame(on_host("h")).hosts.empty());
  f.durable.mutable_budget()->set_same_failures(3);
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
  pb::HostFaults* faults = f.durable.mutable_host_faults();
  cordon("i", "", {.what = "killed by signal 9 (SIGKILL)"}, 0, faults);
  EXPECT_EQ(f.blame(failure).enough, 1) << "that was something else";
  cordon("h", "", {.what = "no such file", .exit_code = kExitBadSource}, 0,
         faults);
  EXPECT_EQ(f.blame(failure).enough, 1) << "it is the same host";
  cordon("i", "", {.what = "no such file", .exit_code = kExitBadSource}, 0,
         faults);
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
  for (int i = 0; i < 2; ++i)
    suspect("h", "", failure, 0, 0, f.durable.mutable_host_faults());
  EXPECT_EQ(f.blame(failure, false).hosts, failure.hosts)
      << "they have too little room for any state";
  f.durable.mutable_assignment()->mutable_source()->set_kind(
      pb::Source::MEMORY);
  EXPECT_TRUE(f.blame(failure, false).hosts.empty()) << "an older state may do";
}

// Whatever their texts say.
TEST(Cordon, ComparesFailuresByTheirExitCodes) {
  const auto alike = [](const Failure& before, int exit_code) {
    pb::HostFaults faults;
    return is_alike(cordon("h", "", before, 0, &faults),
                    {.what = "exit code 66", .exit_code = exit_code});
  };
  const Failure no_data{.what = "exit code 66: no data", .exit_code = 3};
  EXPECT_TRUE(alike(no_data, 3));
  EXPECT_FALSE(alike(no_data, 66));
  EXPECT_FALSE(alike(no_data, 0));
  const Failure other{.what = "exit code 3", .exit_code = 33};
  EXPECT_FALSE(alike(other, 3));
  EXPECT_TRUE(alike(other, 0));
  EXPECT_TRUE(alike(other, 1)) << "neither says why";
}

// A host is at fault from its third failure, also when its cordon has ended.
TEST(Cordon, AHostThatFailsAgainAfterItsCordonIsBlamed) {
  pb::HostFaults faults;
  const Failure like{.what = "", .exit_code = 3};
  for (int i = 1; i <= 3; ++i) {
    suspect("h", "", like, 0, 0, &faults);
    EXPECT_EQ(failed_alike(faults, "h", like), i == 3);
    EXPECT_EQ(hosts_failed_alike(faults, like), std::set<std::string>{"h"});
  }
  EXPECT_FALSE(failed_alike(faults, "h", {.what = "", .exit_code = 66}));
  EXPECT_FALSE(failed_alike(faults, "i", like));
  cordon("i", "", like, 0, &faults);
  EXPECT_TRUE(failed_alike(faults, "i", like));
}

TEST(Cordon, LastsTwiceAsLongAfterEachFailure) {
  pb::HostFaults faults;
  double now_s = 1000;
  for (const double expected : {10.0, 20.0, 40.0, 80.0}) {
    suspect("h", "", {}, 0, now_s, &faults);
    cordon("h", "", {}, now_s, &faults);
    EXPECT_TRUE(is_cordoned(faults, "h"));
    EXPECT_EQ(remaining_s(faults.cordons(0), now_s), expected);
    EXPECT_TRUE(end_cordons(now_s + expected - 1, &faults).empty());
    EXPECT_EQ(end_cordons(now_s + expected, &faults).size(), 1U);
    EXPECT_FALSE(is_cordoned(faults, "h"));
    now_s += expected;
  }
  for (int i = 0; i < 20; ++i) suspect("h", "", {}, 0, now_s, &faults);
  cordon("h", "", {}, now_s, &faults);
  EXPECT_EQ(remaining_s(faults.cordons(0), now_s), 3600);
}

TEST(Cordon, AClockThatIsSetBackDoesNotMakeItLonger) {
  pb::HostFaults faults;
  cordon("h", "", {}, 1e9, &faults);
  EXPECT_EQ(remaining_s(faults.cordons(0), 5e8), 10);
  EXPECT_TRUE(end_cordons(5e8, &faults).empty());
  EXPECT_EQ(end_cordons(5e8 + 10, &faults).size(), 1U);
}

TEST(Cordon, AStepResetsTheCountsOfItsHostsOnly) {
  pb::HostFaults faults;
  for (const char* host : {"a", "b"}) suspect(host, "", {}, 0, 0, &faults);
  suspect("a", "c", {}, 0, 0, &faults);
  EXPECT_TRUE(clear_suspects({"a"}, 1, &faults));
  EXPECT_EQ(failures_of(faults, "a"), 0);
  EXPECT_EQ(failures_of(faults, "b"), 1);
  EXPECT_EQ(failures_of(faults, "c", "a"), 1) << "the link was not used";
  EXPECT_FALSE(clear_suspects({"a"}, 1, &faults));
  EXPECT_TRUE(clear_suspects({"a", "c"}, 1, &faults));
  EXPECT_EQ(failures_of(faults, "a", "c"), 0);
}

TEST(Cordon, LossesAreCountedForAWhileDespiteFinishedSteps) {
  pb::HostFaults faults;
  EXPECT_EQ(suspect("h", "", {}, 300, 0, &faults), 1);
  EXPECT_FALSE(clear_suspects({"h"}, 200, &faults));
  EXPECT_EQ(suspect("h", "", {}, 300, 200, &faults), 2);
  EXPECT_EQ(suspect("h", "", {}, 300, 600, &faults), 1) << "long after";
}

TEST(Cordon, LiftingItResetsTheCount) {
  pb::HostFaults faults;
  suspect("h", "", {}, 0, 0, &faults);
  suspect("h", "i", {}, 0, 0, &faults);
  EXPECT_FALSE(uncordon("h", &faults)) << "not cordoned";
  EXPECT_EQ(faults.suspects_size(), 2) << "nothing is changed";
  suspect("h", "", {}, 0, 0, &faults);
  cordon("h", "", {.what = "why"}, 0, &faults);
  EXPECT_EQ(cordon_reason(faults, "h"), "why");
  EXPECT_NE(cordons_text(faults).find("h (cordoned: why)"), std::string::npos);
  EXPECT_TRUE(uncordon("h", &faults));
  EXPECT_EQ(faults.suspects_size(), 0);
  EXPECT_EQ(cordons_text(faults), "");
}

TEST(Cordon, ManyFailedHostsTakeBoundedMemory) {
  pb::HostFaults faults;
  for (int i = 0; i < 1000; ++i)
    suspect("h" + std::to_string(i), "", {}, 0, 0, &faults);
  EXPECT_LE(faults.suspects_size(), 256);
  EXPECT_EQ(failures_of(faults, "h999"), 1);
  suspect("later", "", {}, 0, 1e5, &faults);
  EXPECT_EQ(faults.suspects_size(), 1);
}

}  // namespace
}  // namespace remesh::core
