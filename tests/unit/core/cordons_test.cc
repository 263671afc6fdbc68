// Cordons: what failures count, for how long a host is cordoned, and what
// clears the count.
#include "coordinator/core/cordons.h"

#include <cstdint>

#include "proto/base/exit_code.h"
#include "tests/testing/expect.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

pb::Elastic elastic() {
  pb::Elastic e;
  e.set_max_same_failures(3);
  return e;
}

struct Fixture : RosterFixture {
  Fixture() { durable = running({"a", "b"}); }
  Blame blame(const Failure& f, bool others_can_run = true) const {
    return blame_for(f, sites_of(f, view()), view(), elastic(), others_can_run);
  }
  // "h", or "worker w on h".
  std::vector<std::string> sites(const Failure& f) const {
    std::vector<std::string> out;
    for (const Site& s : sites_of(f, view()))
      out.push_back(s.worker.empty() ? s.host
                                     : "worker " + s.worker + " on " + s.host);
    return out;
  }
};

std::vector<std::string> hosts(const Blame& b) {
  std::vector<std::string> out;
  for (const Site& s : b.sites) out.push_back(s.host);
  return out;
}

Failure on_host(const std::string& host) {
  return {.what = "x", .rank = 1, .worker = "w", .hosts = {host}};
}

TEST(Blame, CountsFailuresToStartOnTheHost) {
  Fixture f;
  Failure failure = on_host("h");
  failure.at_start = true;
  EXPECT_EQ(hosts(f.blame(failure)), std::vector<std::string>{"h"});
  EXPECT_EQ(f.blame(failure).enough, 2);
  EXPECT_EQ(f.blame(failure, /*others_can_run=*/false).enough, 3);
  failure.rank = -1;
  EXPECT_EQ(f.blame(failure).enough, 3) << "a daemon was restarted";
  failure.hosts.clear();
  EXPECT_TRUE(f.blame(failure).sites.empty()) << "nobody is at fault";
}

TEST(Blame, OnlyTheWorkerIsBlamedIfOthersOfItsHostAreWell) {
  Fixture f;
  f.hear_on("h", "w");
  Failure failure = on_host("h");
  failure.workers = {"w"};
  failure.at_start = true;
  EXPECT_EQ(f.sites(failure), std::vector<std::string>{"h"});
  f.hear_on("h", "v");
  EXPECT_EQ(f.sites(failure), std::vector<std::string>{"worker w on h"});
  failure.exit_code = kExitNoRoom;
  EXPECT_EQ(f.sites(failure), std::vector<std::string>{"h"})
      << "the host lacks it";
  failure.exit_code = kExitFailed;
  EXPECT_EQ(f.sites(failure), std::vector<std::string>{"worker w on h"})
      << "its data may not be mounted";
  failure.at_start = false;
  EXPECT_EQ(f.sites(failure), std::vector<std::string>{"h"});
  failure.at_start = true;
  failure.exit_code = 0;
  failure.silent = true;
  EXPECT_EQ(f.sites(failure), std::vector<std::string>{"h"});
  failure.silent = false;
  failure.at_start = false;
  EXPECT_EQ(f.sites(failure), std::vector<std::string>{"worker w on h"})
      << "in training, too";
  failure.at_start = true;
  failure.workers = {"v", "w"};
  EXPECT_EQ(f.sites(failure), std::vector<std::string>{"h"}) << "both failed";
  failure.workers = {"w"};
  suspect({.host = "h", .worker = "v", .in_training = true}, failure, 60, 0,
          f.durable.mutable_host_faults());
  EXPECT_EQ(f.sites(failure), std::vector<std::string>{"worker w on h"})
      << "the other one has started";
  failure.workers = {"v"};
  for (int i = 0; i < 2; ++i)
    suspect({.host = "h", .worker = "w"}, failure, 0, 0,
            f.durable.mutable_host_faults());
  EXPECT_EQ(f.sites(failure), std::vector<std::string>{"h"})
      << "one after the other";
  failure.workers = {"w"};
  EXPECT_EQ(f.sites(failure), std::vector<std::string>{"worker w on h"})
      << "as before, whatever the others do";
  failure.at_start = false;
  failure.workers = {"v"};
  EXPECT_EQ(f.sites(failure), std::vector<std::string>{"worker v on h"})
      << "in training this ends the other's row";
}

TEST(Blame, AHangOfANewHostCordonsItAtOnce) {
  Fixture f;
  Failure failure = on_host("h");
  failure.at_start = failure.hung = true;
  EXPECT_EQ(f.blame(failure).enough, 2) << "no host is proven";
  f.durable.mutable_host_faults()->add_proven("a");
  EXPECT_EQ(f.blame(failure).enough, 1);
  EXPECT_EQ(f.blame(failure, /*others_can_run=*/false).enough, 3);
  f.durable.mutable_host_faults()->add_proven("h");
  EXPECT_EQ(f.blame(failure).enough, 2);
  failure.rank = -1;
  EXPECT_EQ(f.blame(failure).enough, 2) << "whichever rank it is";
}

TEST(Blame, DeathsInTrainingCountForAWhile) {
  Fixture f;
  const Blame blame = f.blame(on_host("h"));
  ASSERT_EQ(blame.sites.size(), 1U);
  EXPECT_TRUE(blame.sites[0].in_training);
  EXPECT_EQ(blame.enough, 4);
  EXPECT_GT(blame.remembered_s, 0);
  EXPECT_TRUE(f.blame(on_host("h"), /*others_can_run=*/false).sites.empty());
  Failure lost = on_host("h");
  lost.rank = -1;
  EXPECT_TRUE(f.blame(lost).sites.empty()) << "a daemon was restarted";
}

TEST(Blame, ProvenHostsAreNotBlamedForTheStartOfAMeshWithOthers) {
  pb::HostFaults faults;
  const auto hosts = [&](const Failure& f) {
    return of_unproven(f, faults).hosts;
  };
  using Hosts = std::vector<std::string>;
  Failure failure{.hosts = {"b", "c", "a"}, .at_start = true};
  EXPECT_EQ(hosts(failure), failure.hosts) << "none is proven";
  faults.add_proven("a");
  faults.add_proven("b");
  EXPECT_EQ(hosts(failure), Hosts{"c"});
  failure.exit_code = kExitNoRoom;
  EXPECT_EQ(hosts(failure), failure.hosts) << "each lacks it";
  EXPECT_EQ(hosts({.hosts = {"a"}, .at_start = true}), Hosts{"a"}) << "alone";
  EXPECT_EQ(hosts({.hosts = {"a", "c"}}), (Hosts{"a", "c"})) << "in training";
  for (const Failure& f : {Failure{.at_start = true, .links = {{"a", "c"}}},
                           Failure{.at_start = true, .between = {"a", "c"}}}) {
    faults.clear_suspects();
    EXPECT_EQ(hosts(f), Hosts{}) << "the link may be bad";
    for (int i = 0; i < 2; ++i) suspect({.host = "c"}, {}, 0, 0, &faults);
    EXPECT_EQ(hosts(f), Hosts{"c"});
    EXPECT_TRUE(of_unproven(f, faults).links.empty());
    EXPECT_TRUE(of_unproven(f, faults).between.empty());
  }
}

TEST(Blame, ARepeatedFailureIsBlamedOnTheHost) {
  Fixture f;
  f.durable.mutable_budget()->set_same_failures(2);
  EXPECT_TRUE(f.blame(on_host("h"), false).sites.empty());
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
  EXPECT_TRUE(f.blame(failure, false).sites.empty());
}

TEST(Blame, AllHostsWhoseRanksFailedToStartAreCounted) {
  Fixture f;
  Failure failure = on_host("h");
  failure.hosts.push_back("i");
  failure.at_start = true;
  EXPECT_EQ(hosts(f.blame(failure)), failure.hosts);
  EXPECT_TRUE(f.blame(failure).others_can_run);
  EXPECT_FALSE(f.blame(failure, /*others_can_run=*/false).others_can_run);
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
  cordon({.host = "i"}, {.what = "killed by signal 9 (SIGKILL)"}, 0, faults);
  EXPECT_EQ(f.blame(failure).enough, 1) << "that was something else";
  cordon({.host = "h"}, {.what = "no such file", .exit_code = kExitBadSource},
         0, faults);
  EXPECT_EQ(f.blame(failure).enough, 1) << "it is the same host";
  cordon({.host = "i"}, {.what = "no such file", .exit_code = kExitBadSource},
         0, faults);
  EXPECT_EQ(f.blame(failure).enough, kNever);
}

TEST(Blame, NoHostIsBlamedForAnIncompleteSource) {
  Fixture f;
  pb::Source* source = f.durable.mutable_assignment()->mutable_source();
  source->set_kind(pb::Source::MEMORY);
  source->add_states()->set_worker("gone");
  Failure failure = on_host("h");
  failure.exit_code = kExitBadSource;
  EXPECT_TRUE(f.blame(failure).sites.empty());
}

TEST(Blame, AllHostsThatCannotContinueAreNamed) {
  Fixture f;
  Failure failure = on_host("h");
  failure.hosts.push_back("i");
  failure.exit_code = kExitFailed;
  EXPECT_EQ(hosts(f.blame(failure)), failure.hosts);
  EXPECT_EQ(f.blame(failure).enough, 1);
  failure.exit_code = kExitNoRoom;
  EXPECT_EQ(hosts(f.blame(failure)), failure.hosts);
  EXPECT_EQ(f.blame(failure).enough, 2) << "once without replicas";
  for (int i = 0; i < 2; ++i)
    suspect({.host = "h"}, failure, 0, 0, f.durable.mutable_host_faults());
  EXPECT_EQ(hosts(f.blame(failure, false)), failure.hosts)
      << "they have too little room for any state";
  f.durable.mutable_assignment()->mutable_source()->set_kind(
      pb::Source::MEMORY);
  EXPECT_TRUE(f.blame(failure, false).sites.empty()) << "an older state may do";
}

// Whatever their texts say.
TEST(Cordon, ComparesFailuresByTheirExitCodes) {
  const auto alike = [](const Failure& before, int exit_code) {
    pb::HostFaults faults;
    return is_alike(cordon({.host = "h"}, before, 0, &faults),
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
    suspect({.host = "h"}, like, 0, 0, &faults);
    EXPECT_EQ(failed_alike(faults, "h", "w", like), i == 3);
    EXPECT_EQ(hosts_failed_alike(faults, like), std::set<std::string>{"h"});
  }
  EXPECT_FALSE(failed_alike(faults, "h", "w", {.what = "", .exit_code = 66}));
  EXPECT_FALSE(failed_alike(faults, "i", "w", like));
  cordon({.host = "i"}, like, 0, &faults);
  EXPECT_TRUE(failed_alike(faults, "i", "w", like));
}

TEST(Cordon, LastsTwiceAsLongAfterEachFailure) {
  pb::HostFaults faults;
  double now_s = 1000;
  for (const double expected : {10.0, 20.0, 40.0, 80.0}) {
    suspect({.host = "h"}, {}, 0, now_s, &faults);
    cordon({.host = "h"}, {}, now_s, &faults);
    EXPECT_TRUE(is_cordoned(faults, "h"));
    EXPECT_EQ(remaining_s(faults.cordons(0), now_s), expected);
    EXPECT_TRUE(end_cordons(now_s + expected - 1, &faults).empty());
    EXPECT_EQ(end_cordons(now_s + expected, &faults).size(), 1U);
    EXPECT_FALSE(is_cordoned(faults, "h"));
    now_s += expected;
  }
  for (int i = 0; i < 20; ++i) suspect({.host = "h"}, {}, 0, now_s, &faults);
  cordon({.host = "h"}, {}, now_s, &faults);
  EXPECT_EQ(remaining_s(faults.cordons(0), now_s), 3600);
}

TEST(Cordon, LastsTenTimesAsLongAsTheFailureCost) {
  pb::HostFaults faults;
  cordon({.host = "h"}, {.what = "", .cost_s = 120}, 0, &faults);
  EXPECT_EQ(remaining_s(faults.cordons(0), 0), 1200);
  cordon({.host = "h"}, {.what = "", .cost_s = 0.5}, 0, &faults);
  EXPECT_EQ(remaining_s(faults.cordons(0), 0), 10);
}

TEST(Cordon, OfOneWorkerLeavesTheOthersOfItsHost) {
  pb::HostFaults faults;
  suspect({.host = "h", .worker = "w"}, {}, 0, 0, &faults);
  cordon({.host = "h", .worker = "w"}, {.what = "x"}, 0, &faults);
  EXPECT_TRUE(is_cordoned(faults, "h", "w"));
  EXPECT_FALSE(is_cordoned(faults, "h", "v"));
  EXPECT_FALSE(is_cordoned(faults, "h"));
  EXPECT_EQ(cordons_text(faults),
            "no ranks are placed on worker w on h (cordoned: x)");
  EXPECT_FALSE(clear_suspects({"h"}, {"v"}, 1, &faults));
  EXPECT_TRUE(clear_suspects({"h"}, {"w"}, 1, &faults));
  cordon({.host = "h"}, {.what = "y"}, 0, &faults);
  EXPECT_EQ(faults.cordons_size(), 1) << "of the host, so of all";
  EXPECT_TRUE(is_cordoned(faults, "h", "v"));
}

// Deaths in training count only in a row, and not as failures to start.
TEST(Cordon, DeathsInTrainingAreCountedApart) {
  pb::HostFaults faults;
  const Site h{.host = "h", .in_training = true};
  EXPECT_EQ(suspect(h, {}, 60, 0, &faults), 1);
  EXPECT_EQ(suspect(h, {}, 60, 30, &faults), 2);
  EXPECT_EQ(failures_of(faults, {.host = "h"}), 0);
  EXPECT_FALSE(failed_alike(faults, "h", "w", {}));
  cordon(h, {}, 30, &faults);
  EXPECT_FALSE(failed_alike(faults, "h", "w", {})) << "its ranks do start";
  EXPECT_FALSE(clear_suspects({"h"}, {}, 100, &faults))
      << "soon after the cordon";
  EXPECT_EQ(suspect(h, {}, 60, 100, &faults), 3);
  EXPECT_EQ(suspect({.host = "i", .in_training = true}, {}, 60, 110, &faults),
            1);
  EXPECT_EQ(failures_of(faults, h), 0) << "another host's rank died";
}

TEST(Cordon, DeathsInTrainingOfWorkersOfOneHostEndEachOthersRows) {
  pb::HostFaults faults;
  faults.add_proven("h");
  const auto dies = [&](const char* worker) {
    return suspect({.host = "h", .worker = worker, .in_training = true}, {}, 60,
                   0, &faults);
  };
  EXPECT_EQ(dies("v"), 1);
  EXPECT_EQ(dies("v"), 2);
  EXPECT_EQ(dies("w"), 1);
  EXPECT_EQ(dies("v"), 1);
}

TEST(Cordon, DeathsInTrainingOfFewHostsDoNotEndEachOthersRows) {
  pb::HostFaults faults;
  for (const char* host : {"a", "b", "c", "d", "e"}) faults.add_proven(host);
  const auto dies = [&](const char* host, double now_s) {
    return suspect({.host = host, .in_training = true}, {}, 60, now_s, &faults);
  };
  EXPECT_EQ(dies("a", 0), 1);
  EXPECT_EQ(dies("b", 1), 1);
  EXPECT_EQ(dies("a", 2), 2) << "three others are well";
  EXPECT_EQ(dies("b", 3), 2);
  EXPECT_EQ(dies("c", 4), 1);
  EXPECT_EQ(dies("a", 5), 1) << "then only two were";
  EXPECT_EQ(dies("d", 100), 1);
  EXPECT_EQ(dies("e", 101), 1);
  EXPECT_EQ(dies("d", 102), 2) << "those of a and c were long ago";
}

TEST(Cordon, AClockThatIsSetBackDoesNotMakeItLonger) {
  pb::HostFaults faults;
  cordon({.host = "h"}, {}, 1e9, &faults);
  EXPECT_EQ(remaining_s(faults.cordons(0), 5e8), 10);
  EXPECT_TRUE(end_cordons(5e8, &faults).empty());
  EXPECT_EQ(end_cordons(5e8 + 10, &faults).size(), 1U);
}

TEST(Cordon, AStepResetsTheCountsOfItsHostsOnly) {
  pb::HostFaults faults;
  for (const char* host : {"a", "b"})
    suspect({.host = host}, {}, 0, 0, &faults);
  suspect({.host = "a", .peer = "c"}, {}, 0, 0, &faults);
  EXPECT_TRUE(clear_suspects({"a"}, {}, 1, &faults));
  EXPECT_EQ(failures_of(faults, {.host = "a"}), 0);
  EXPECT_EQ(failures_of(faults, {.host = "b"}), 1);
  EXPECT_EQ(failures_of(faults, {.host = "c", .peer = "a"}), 1)
      << "the link was not used";
  EXPECT_FALSE(clear_suspects({"a"}, {}, 1, &faults));
  EXPECT_TRUE(clear_suspects({"a", "c"}, {}, 1, &faults));
  EXPECT_EQ(failures_of(faults, {.host = "a", .peer = "c"}), 0);
}

TEST(Cordon, LossesAreCountedForAWhileDespiteFinishedSteps) {
  pb::HostFaults faults;
  EXPECT_EQ(suspect({.host = "h"}, {}, 300, 0, &faults), 1);
  EXPECT_FALSE(clear_suspects({"h"}, {}, 200, &faults));
  EXPECT_EQ(suspect({.host = "h"}, {}, 300, 200, &faults), 2);
  EXPECT_EQ(suspect({.host = "h"}, {}, 300, 600, &faults), 1) << "long after";
}

TEST(Cordon, LiftingItResetsTheCount) {
  pb::HostFaults faults;
  suspect({.host = "h"}, {}, 0, 0, &faults);
  suspect({.host = "h", .peer = "i"}, {}, 0, 0, &faults);
  EXPECT_FALSE(uncordon({.host = "h"}, &faults)) << "not cordoned";
  EXPECT_EQ(faults.suspects_size(), 2) << "nothing is changed";
  suspect({.host = "h"}, {}, 0, 0, &faults);
  cordon({.host = "h"}, {.what = "why"}, 0, &faults);
  EXPECT_EQ(cordon_reason(faults, "h", "w"), "why");
  EXPECT_HAS(cordons_text(faults), "h (cordoned: why)");
  EXPECT_TRUE(uncordon({.host = "h"}, &faults));
  EXPECT_EQ(faults.suspects_size(), 0);
  EXPECT_EQ(cordons_text(faults), "");
}

TEST(Cordon, ManyFailedHostsTakeBoundedMemory) {
  pb::HostFaults faults;
  for (int i = 0; i < 1000; ++i)
    suspect({.host = "h" + std::to_string(i)}, {}, 0, 0, &faults);
  EXPECT_LE(faults.suspects_size(), 256);
  EXPECT_EQ(failures_of(faults, {.host = "h999"}), 1);
  suspect({.host = "later"}, {}, 0, 1e5, &faults);
  EXPECT_EQ(faults.suspects_size(), 1);
}

}  // namespace
}  // namespace remesh::core
