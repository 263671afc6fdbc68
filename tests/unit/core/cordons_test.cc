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
  Blame blame(const pb::Cause& f, bool others_can_run = true) const {
    return blame_for(f, sites_of(f, view()), view(), elastic(), others_can_run);
  }
  // "h", or "worker w on h".
  std::vector<std::string> sites(const pb::Cause& f) const {
    std::vector<std::string> out;
    for (const Site& s : sites_of(f, view()))
      out.push_back(s.worker.empty() ? s.host
                                     : "worker " + s.worker + " on " + s.host);
    return out;
  }
};

class BlameTest : public testing::Test, protected Fixture {};

std::vector<std::string> hosts(const Blame& b) {
  std::vector<std::string> out;
  for (const Site& s : b.sites) out.push_back(s.host);
  return out;
}

using Hosts = std::vector<std::string>;

Hosts hosts(const pb::Cause& f) { return {f.hosts().begin(), f.hosts().end()}; }

void set_workers(const std::vector<std::string>& workers, pb::Cause* f) {
  f->mutable_workers()->Assign(workers.begin(), workers.end());
}

pb::Cause on_host(const std::string& host) {
  pb::Cause f = cause("what: 'x' rank: 1 worker: 'w'");
  f.add_hosts(host);
  return f;
}

TEST_F(BlameTest, CountsFailuresToStartOnTheHost) {
  pb::Cause failure = on_host("h");
  failure.set_at_start(true);
  EXPECT_EQ(hosts(blame(failure)), std::vector<std::string>{"h"});
  EXPECT_EQ(blame(failure).enough, 2);
  EXPECT_EQ(blame(failure, /*others_can_run=*/false).enough, 3);
  failure.set_rank(-1);
  EXPECT_EQ(blame(failure).enough, 3) << "a daemon was restarted";
  failure.clear_hosts();
  EXPECT_TRUE(blame(failure).sites.empty()) << "nobody is at fault";
}

TEST_F(BlameTest, OnlyTheWorkerIsBlamedIfOthersOfItsHostAreWell) {
  hear_on("h", "w");
  pb::Cause failure = on_host("h");
  set_workers({"w"}, &failure);
  failure.set_at_start(true);
  EXPECT_EQ(sites(failure), std::vector<std::string>{"h"});
  for (int i = 0; i < 2; ++i)
    suspect({.host = "h", .worker = "w"}, failure, 0, 0,
            durable.mutable_host_faults());
  EXPECT_EQ(sites(failure), std::vector<std::string>{"worker w on h"})
      << "it failed while the others were there";
  durable.clear_host_faults();
  hear_on("h", "v");
  EXPECT_EQ(sites(failure), std::vector<std::string>{"worker w on h"});
  for (int i = 0; i < 3; ++i)
    suspect({.host = "h"}, failure, 0, 0, durable.mutable_host_faults());
  EXPECT_EQ(sites(failure), std::vector<std::string>{"worker w on h"})
      << "v was not there when the host failed";
  durable.clear_host_faults();
  failure.set_exit_code(kExitNoRoom);
  EXPECT_EQ(sites(failure), std::vector<std::string>{"h"})
      << "the host lacks it";
  failure.set_exit_code(kExitFailed);
  EXPECT_EQ(sites(failure), std::vector<std::string>{"worker w on h"})
      << "its data may not be mounted";
  failure.set_at_start(false);
  EXPECT_EQ(sites(failure), std::vector<std::string>{"h"});
  failure.set_at_start(true);
  failure.set_exit_code(0);
  failure.set_silent(true);
  EXPECT_EQ(sites(failure), std::vector<std::string>{"h"});
  failure.set_silent(false);
  failure.set_at_start(false);
  EXPECT_EQ(sites(failure), std::vector<std::string>{"worker w on h"})
      << "in training, too";
  failure.set_at_start(true);
  set_workers({"v", "w"}, &failure);
  EXPECT_EQ(sites(failure), std::vector<std::string>{"h"}) << "both failed";
  set_workers({"w"}, &failure);
  suspect({.host = "h", .worker = "v", .in_training = true}, failure, 60, 0,
          durable.mutable_host_faults());
  EXPECT_EQ(sites(failure), std::vector<std::string>{"worker w on h"})
      << "the other one has started";
  set_workers({"v"}, &failure);
  for (int i = 0; i < 2; ++i)
    suspect({.host = "h", .worker = "w"}, failure, 0, 0,
            durable.mutable_host_faults());
  EXPECT_EQ(sites(failure), std::vector<std::string>{"h"})
      << "one after the other";
  set_workers({"w"}, &failure);
  EXPECT_EQ(sites(failure), std::vector<std::string>{"worker w on h"})
      << "as before, whatever the others do";
  failure.set_at_start(false);
  set_workers({"v"}, &failure);
  EXPECT_EQ(sites(failure), std::vector<std::string>{"worker v on h"})
      << "in training this ends the other's row";
}

TEST_F(BlameTest, AHangOfANewHostCordonsItAtOnce) {
  pb::Cause failure = on_host("h");
  failure.set_at_start(true);
  failure.set_hung(true);
  EXPECT_EQ(blame(failure).enough, 2) << "no host is proven";
  durable.mutable_host_faults()->add_proven("a");
  EXPECT_EQ(blame(failure).enough, 1);
  EXPECT_EQ(blame(failure, /*others_can_run=*/false).enough, 3);
  durable.mutable_host_faults()->add_proven("h");
  EXPECT_EQ(blame(failure).enough, 2);
  failure.set_rank(-1);
  EXPECT_EQ(blame(failure).enough, 2) << "whichever rank it is";
}

TEST_F(BlameTest, DeathsInTrainingCountForAWhile) {
  const Blame death = blame(on_host("h"));
  ASSERT_EQ(death.sites.size(), 1U);
  EXPECT_TRUE(death.sites[0].in_training);
  EXPECT_EQ(death.enough, 4);
  EXPECT_GT(death.remembered_s, 0);
  EXPECT_TRUE(blame(on_host("h"), /*others_can_run=*/false).sites.empty());
  pb::Cause lost = on_host("h");
  lost.set_rank(-1);
  EXPECT_TRUE(blame(lost).sites.empty()) << "a daemon was restarted";
}

TEST_F(BlameTest, ProvenHostsAreNotBlamedForTheStartOfAMeshWithOthers) {
  pb::HostFaults faults;
  const auto blamed = [&](const pb::Cause& f) {
    return hosts(of_unproven(f, faults));
  };
  pb::Cause failure = cause("hosts: ['b', 'c', 'a'] at_start: true");
  EXPECT_EQ(blamed(failure), hosts(failure)) << "none is proven";
  faults.add_proven("a");
  faults.add_proven("b");
  EXPECT_EQ(blamed(failure), Hosts{"c"});
  failure.set_exit_code(kExitNoRoom);
  EXPECT_EQ(blamed(failure), hosts(failure)) << "each lacks it";
  EXPECT_EQ(blamed(cause("hosts: 'a' at_start: true")), Hosts{"a"}) << "alone";
  EXPECT_EQ(blamed(cause("hosts: ['a', 'c']")), (Hosts{"a", "c"}))
      << "in training";
  for (const char* where : {"links", "between"}) {
    const pb::Cause f =
        cause(std::string(where) + ": ['a', 'c'] at_start: true");
    faults.clear_suspects();
    EXPECT_EQ(blamed(f), Hosts{}) << "the link may be bad";
    for (int i = 0; i < 2; ++i) suspect({.host = "c"}, {}, 0, 0, &faults);
    EXPECT_EQ(blamed(f), Hosts{"c"});
    EXPECT_TRUE(of_unproven(f, faults).links().empty());
    EXPECT_TRUE(of_unproven(f, faults).between().empty());
  }
}

TEST_F(BlameTest, ARepeatedFailureIsBlamedOnTheHost) {
  durable.mutable_budget()->set_same_failures(2);
  EXPECT_TRUE(blame(on_host("h"), false).sites.empty());
  durable.mutable_budget()->set_same_failures(3);
  EXPECT_EQ(blame(on_host("h")).enough, 1);
}

TEST_F(BlameTest, LossesBySilenceAreRememberedLonger) {
  pb::Cause failure = on_host("h");
  failure.set_rank(-1);
  failure.set_silent(true);
  EXPECT_EQ(blame(failure).enough, 2);
  EXPECT_GT(blame(failure).remembered_s, 0);
  EXPECT_TRUE(blame(failure, false).sites.empty());
}

TEST_F(BlameTest, AllHostsWhoseRanksFailedToStartAreCounted) {
  pb::Cause failure = on_host("h");
  failure.add_hosts("i");
  failure.set_at_start(true);
  EXPECT_EQ(hosts(blame(failure)), hosts(failure));
  EXPECT_TRUE(blame(failure).others_can_run);
  EXPECT_FALSE(blame(failure, /*others_can_run=*/false).others_can_run);
}

TEST_F(BlameTest, WithoutASourceThatCodeIsBlamedOnTheHost) {
  pb::Cause failure = on_host("h");
  failure.set_exit_code(kExitBadSource);
  failure.set_at_start(true);
  failure.add_hosts("i");
  EXPECT_EQ(blame(failure).enough, 2);
}

constexpr int64_t kNever = INT64_MAX;

TEST_F(BlameTest, ASourceThatTwoHostsCannotLoadIsBad) {
  durable.mutable_assignment()->mutable_source()->set_kind(
      pb::Source::CHECKPOINT);
  pb::Cause failure = on_host("h");
  failure.set_exit_code(kExitBadSource);
  EXPECT_EQ(blame(failure).enough, 1);
  failure.add_hosts("i");
  EXPECT_EQ(blame(failure).enough, kNever);
  failure.mutable_hosts()->RemoveLast();
  pb::HostFaults* faults = durable.mutable_host_faults();
  cordon({.host = "i"}, cause_of("killed by signal 9 (SIGKILL)"), 0, faults);
  EXPECT_EQ(blame(failure).enough, 1) << "that was something else";
  cordon({.host = "h"}, cause("what: 'no such file' exit_code: 65"), 0, faults);
  EXPECT_EQ(blame(failure).enough, 1) << "it is the same host";
  cordon({.host = "i"}, cause("what: 'no such file' exit_code: 65"), 0, faults);
  EXPECT_EQ(blame(failure).enough, kNever);
}

TEST_F(BlameTest, NoHostIsBlamedForAnIncompleteSource) {
  pb::Source* source = durable.mutable_assignment()->mutable_source();
  source->set_kind(pb::Source::MEMORY);
  source->add_states()->set_worker("gone");
  pb::Cause failure = on_host("h");
  failure.set_exit_code(kExitBadSource);
  EXPECT_TRUE(blame(failure).sites.empty());
}

TEST_F(BlameTest, AllHostsThatCannotContinueAreNamed) {
  pb::Cause failure = on_host("h");
  failure.add_hosts("i");
  failure.set_exit_code(kExitFailed);
  EXPECT_EQ(hosts(blame(failure)), hosts(failure));
  EXPECT_EQ(blame(failure).enough, 1);
  failure.set_exit_code(kExitNoRoom);
  EXPECT_EQ(hosts(blame(failure)), hosts(failure));
  EXPECT_EQ(blame(failure).enough, 2) << "once without replicas";
  for (int i = 0; i < 2; ++i)
    suspect({.host = "h"}, failure, 0, 0, durable.mutable_host_faults());
  EXPECT_EQ(hosts(blame(failure, false)), hosts(failure))
      << "they have too little room for any state";
  durable.mutable_assignment()->mutable_source()->set_kind(pb::Source::MEMORY);
  EXPECT_TRUE(blame(failure, false).sites.empty()) << "an older state may do";
}

// Whatever their texts say.
TEST(Cordon, ComparesFailuresByTheirExitCodes) {
  const auto alike = [](const pb::Cause& before, int exit_code) {
    pb::HostFaults faults;
    pb::Cause now = cause_of("exit code 66");
    now.set_exit_code(exit_code);
    return is_alike(cordon({.host = "h"}, before, 0, &faults), now);
  };
  const pb::Cause no_data = cause("what: 'exit code 66: no data' exit_code: 3");
  EXPECT_TRUE(alike(no_data, 3));
  EXPECT_FALSE(alike(no_data, 66));
  EXPECT_FALSE(alike(no_data, 0));
  const pb::Cause other = cause("what: 'exit code 3' exit_code: 33");
  EXPECT_FALSE(alike(other, 3));
  EXPECT_TRUE(alike(other, 0));
  EXPECT_TRUE(alike(other, 1)) << "neither says why";
}

// A host is at fault from its third failure, also when its cordon has ended.
TEST(Cordon, AHostThatFailsAgainAfterItsCordonIsBlamed) {
  pb::HostFaults faults;
  const pb::Cause like = cause("exit_code: 3");
  for (int i = 1; i <= 3; ++i) {
    suspect({.host = "h"}, like, 0, 0, &faults);
    EXPECT_EQ(failed_alike(faults, "h", "w", like), i == 3);
    EXPECT_EQ(hosts_failed_alike(faults, like), std::set<std::string>{"h"});
  }
  EXPECT_FALSE(failed_alike(faults, "h", "w", cause("exit_code: 66")));
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
  cordon({.host = "h"}, cause("cost_s: 120"), 0, &faults);
  EXPECT_EQ(remaining_s(faults.cordons(0), 0), 1200);
  cordon({.host = "h"}, cause("cost_s: 0.5"), 0, &faults);
  EXPECT_EQ(remaining_s(faults.cordons(0), 0), 10);
}

TEST(Cordon, OfOneWorkerLeavesTheOthersOfItsHost) {
  pb::HostFaults faults;
  suspect({.host = "h", .worker = "w"}, {}, 0, 0, &faults);
  cordon({.host = "h", .worker = "w"}, cause_of("x"), 0, &faults);
  EXPECT_TRUE(is_cordoned(faults, "h", "w"));
  EXPECT_FALSE(is_cordoned(faults, "h", "v"));
  EXPECT_FALSE(is_cordoned(faults, "h"));
  EXPECT_EQ(cordons_text(faults),
            "no ranks are placed on worker w on h (cordoned: x)");
  EXPECT_FALSE(clear_suspects({"h"}, {"v"}, 1, &faults));
  EXPECT_TRUE(clear_suspects({"h"}, {"w"}, 1, &faults));
  cordon({.host = "h"}, cause_of("y"), 0, &faults);
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
  cordon({.host = "h"}, cause_of("why"), 0, &faults);
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
