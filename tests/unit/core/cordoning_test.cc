// Which hosts are cordoned after failures, and which are not because the job
// cannot do without them.
#include "coordinator/core/cordoning.h"

#include "coordinator/core/durable.h"
#include "proto/base/exit_code.h"
#include "tests/testing/expect.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

class CordoningTest : public ::testing::Test, protected RosterFixture {
 protected:
  void run_on(const std::vector<std::string>& workers) {
    durable = running(workers);
    hear_all(workers);
  }
  Cordoning cordoning() {
    return Cordoning({.view = view(now_ms_),
                      .policy = policy_,
                      .elastic = job_.elastic(),
                      .unix_s = unix_s_,
                      .faults = durable.mutable_host_faults()});
  }
  // These workers are there, and the job waits for a mesh.
  void wait_with(const std::vector<std::string>& workers) {
    durable.set_phase(pb::Durable::WAITING);
    hear_all(workers);
    now_ms_ = 5000;
  }
  bool ends_in_time() {
    Cordoning c = cordoning();
    const bool out = c.end_in_time();
    changes_ = c.changes();
    return out;
  }
  Consequence after(const pb::Cause& f) {
    Cordoning c = cordoning();
    const Consequence out = c.after(f);
    changes_ = c.changes();
    return out;
  }
  std::vector<std::string> begun() const {
    std::vector<std::string> hosts;
    for (const pb::Cordon& c : changes_.begun) hosts.push_back(c.host());
    return hosts;
  }

  pb::Job job_ = small_job();
  MeshPolicy policy_{job_, std::nullopt};
  Cordoning::Changes changes_;
  double unix_s_ = 0;
  int64_t now_ms_ = 0;
};

using Hosts = std::vector<std::string>;

pb::Cause no_start() {
  return cause("what: 'x' rank: 0 worker: 'a' hosts: 'host-a' at_start: true");
}

pb::Cause failure_of_link(const std::string& a, const std::string& b) {
  pb::Cause c = cause_of("x");
  set_links({{a, b}}, &c);
  return c;
}

TEST_F(CordoningTest, AHostWhoseRanksDoNotStartIsCordonedIfOthersCanRun) {
  run_on({"a", "b"});
  EXPECT_EQ(after(no_start()), Consequence::kOthersCanRun);
  EXPECT_TRUE(changes_.any);
  EXPECT_EQ(begun(), Hosts{});
  EXPECT_EQ(after(no_start()), Consequence::kCordoned);
  EXPECT_EQ(begun(), Hosts{"host-a"});
  EXPECT_TRUE(is_cordoned(durable.host_faults(), "host-a"));
}

TEST_F(CordoningTest, TheLastHostIsCordonedOnlyIfOthersMayReturn) {
  run_on({"a"});
  for (int i = 0; i < 5; ++i)
    EXPECT_NE(after(no_start()), Consequence::kCordoned);
  EXPECT_FALSE(is_cordoned(durable.host_faults(), "host-a"));
  roster.expect_unheard(/*until_ms=*/1);
  EXPECT_EQ(after(no_start()), Consequence::kCordoned);
}

// They fail to read the inputs of the job, which has made a step.
class UnreadableInputsTest : public CordoningTest {
 protected:
  UnreadableInputsTest() {
    run_on({"a", "b"});
    count_ranks(durable.mutable_assignment());
  }
  // Whether the job waits until somebody can read its inputs.
  bool waits_after(const Hosts& hosts) {
    pb::Cause f = cause_of("x");
    f.set_exit_code(kExitUnreadable);
    f.set_rank(0);
    f.mutable_hosts()->Assign(hosts.begin(), hosts.end());
    ClusterView now = view(now_ms_);
    now.last_finished = 1;
    Cordoning c({.view = now,
                 .policy = policy_,
                 .elastic = job_.elastic(),
                 .unix_s = unix_s_,
                 .faults = durable.mutable_host_faults()});
    const FailureVerdict v =
        c.judge(f, durable.mutable_budget(), durable.mutable_refusals());
    EXPECT_FALSE(v.give_up);
    changes_ = c.changes();
    return v.unreadable;
  }
};

TEST_F(UnreadableInputsTest, CordonNobodyWhenNobodyReadsThem) {
  EXPECT_TRUE(waits_after({"host-a", "host-b"}));
  // Hosts that may return would not read them either, as far as is known.
  roster.expect_unheard(/*until_ms=*/1);
  durable.mutable_host_faults()->add_proven("host-c");
  EXPECT_TRUE(waits_after({"host-a", "host-b"}));
  EXPECT_EQ(durable.host_faults().cordons_size(), 0);
}

TEST_F(UnreadableInputsTest, CordonBrieflyHoweverLongNobodyReadThem) {
  for (int i = 0; i < 20; ++i)
    ASSERT_TRUE(waits_after({"host-a", "host-b"})) << i;
  hear_all({"c"});
  EXPECT_FALSE(waits_after({"host-a", "host-b"}));
  EXPECT_EQ(begun(), (Hosts{"host-a", "host-b"}));
  for (const pb::Cordon& c : durable.host_faults().cordons()) {
    EXPECT_LE(remaining_s(c, unix_s_), 80);
    EXPECT_TRUE(rescue_wait_ms(c.failures(), job_.elastic()).has_value());
  }
}

TEST_F(UnreadableInputsTest, CordonThoseThatDoNotReadThemWhenOthersDoAgain) {
  for (int i = 0; i < 20; ++i)
    ASSERT_TRUE(waits_after({"host-a", "host-b"})) << i;
  EXPECT_FALSE(waits_after({"host-b"}));
  EXPECT_EQ(begun(), Hosts{"host-b"});
}

// Then it may be what they share.
TEST_F(CordoningTest, ANewHostThatHangsWithOthersIsNotCordonedAtOnce) {
  run_on({"a", "b"});
  durable.mutable_host_faults()->add_proven("host-b");
  pb::Cause hang = no_start();
  hang.set_hung(true);
  hang.add_hosts("host-b");
  EXPECT_EQ(after(hang), Consequence::kOthersCanRun);
  hang.mutable_hosts()->RemoveLast();
  durable.mutable_host_faults()->clear_suspects();
  EXPECT_EQ(after(hang), Consequence::kCordoned) << "alone";
}

// But not without end.
TEST_F(CordoningTest, AHostThatIsNotProvenWaitsForThoseThatAre) {
  job_.mutable_elastic()->set_max_failures_without_progress(10);
  run_on({"a"});
  durable.mutable_host_faults()->add_proven("host-b");
  int cordons = 0;
  for (int i = 0; i < 20; ++i)
    cordons += after(no_start()) == Consequence::kCordoned ? 1 : 0;
  EXPECT_EQ(cordons, 7) << "from the third failure to the ninth";
  durable.clear_host_faults();
  for (const char* host : {"host-a", "host-b"})
    durable.mutable_host_faults()->add_proven(host);
  for (int i = 0; i < 5; ++i)
    EXPECT_NE(after(no_start()), Consequence::kCordoned) << "it ran the job";
}

// If each of its workers is needed, it makes no difference which one fails.
TEST_F(CordoningTest, AWorkerWithoutWhichTheJobCannotRunIsNotBlamedAlone) {
  run_on({"a", "b"});
  hear_on("host-a", "b");
  pb::Cause f = no_start();
  f.add_workers("a");
  const auto site = [&] {
    const auto& suspects = durable.host_faults().suspects();
    return suspects.empty() ? "none" : suspects[0].worker();
  };
  after(f);
  EXPECT_EQ(site(), "a");
  durable.clear_host_faults();
  job_.mutable_elastic()->set_min_slots(2);
  policy_ = MeshPolicy(job_, std::nullopt);
  for (int i = 0; i < 4; ++i) EXPECT_NE(after(f), Consequence::kCordoned);
  EXPECT_EQ(site(), "");
}

TEST_F(CordoningTest, TwoWorkersThatFailTogetherCountOnceOnTheirHost) {
  run_on({"a", "b", "c"});
  for (const char* worker : {"b", "c"}) hear_on("host-a", worker);
  pb::Cause f = no_start();
  for (const char* worker : {"a", "b"}) f.add_workers(worker);
  job_.mutable_elastic()->set_min_slots(3);
  policy_ = MeshPolicy(job_, std::nullopt);
  after(f);
  ASSERT_EQ(durable.host_faults().suspects_size(), 1);
  EXPECT_EQ(durable.host_faults().suspects(0).failures(), 1);
}

// However long the generations between take to start.
TEST_F(CordoningTest, DeathsSoonAfterTheFirstStepCordon) {
  run_on({"a", "b"});
  pb::Cause death = no_start();
  death.set_at_start(false);
  for (int i = 1; i <= 4; ++i) {
    unix_s_ += 1000;
    EXPECT_EQ(cordoning().after_step(/*first=*/true), i == 1)
        << "it is proven from then on, and nothing else changes";
    unix_s_ += 1;
    EXPECT_EQ(after(death),
              i == 4 ? Consequence::kCordoned : Consequence::kSuspected);
  }
  EXPECT_EQ(begun(), Hosts{"host-a"});
  durable.clear_host_faults();
  after(death);
  EXPECT_TRUE(cordoning().after_step(/*first=*/true)) << "it is proven again";
  EXPECT_EQ(durable.host_faults().suspects_size(), 1);
  unix_s_ += 100;
  EXPECT_TRUE(cordoning().after_step(/*first=*/false));
  EXPECT_EQ(durable.host_faults().suspects_size(), 0) << "it trained";
}

// They may be on any rank and at any step. But they may be the job's own fault.
TEST_F(CordoningTest, ADeathThatWouldEndTheJobCordonsWhileOthersCanRun) {
  run_on({"a", "b"});
  pb::Cause death = no_start();
  death.set_at_start(false);
  EXPECT_FALSE(
      cordoning()
          .judge(death, durable.mutable_budget(), durable.mutable_refusals())
          .give_up);
  EXPECT_FALSE(is_cordoned(durable.host_faults(), "host-a"));
  durable.mutable_budget()->set_failures(
      job_.elastic().max_failures_without_progress() - 1);
  for (int i = 1; i <= 5; ++i) {
    death.set_step(i);
    EXPECT_EQ(
        cordoning()
            .judge(death, durable.mutable_budget(), durable.mutable_refusals())
            .give_up,
        i == 5);
    EXPECT_EQ(end_cordon({.host = "host-a"}, durable.mutable_host_faults()),
              i < 5);
  }
  durable.clear_host_faults();
  job_.mutable_elastic()->set_min_slots(2);
  policy_ = MeshPolicy(job_, std::nullopt);
  EXPECT_TRUE(
      cordoning()
          .judge(death, durable.mutable_budget(), durable.mutable_refusals())
          .give_up)
      << "it needs both";
}

// All links of three hosts are bad: each is cordoned in turn, but not for ever.
TEST_F(CordoningTest, LinksThatAreCordonedInTurnCount) {
  job_.mutable_elastic()->set_min_slots(2);
  policy_ = MeshPolicy(job_, std::nullopt);
  run_on({"a", "b", "c"});
  int counted = 0;
  for (int i = 0; i < 30; ++i) {
    std::vector<std::string> up;
    for (const char* h : {"host-a", "host-b", "host-c"})
      if (!is_cordoned(durable.host_faults(), h)) up.push_back(h);
    ASSERT_GE(up.size(), 2U);
    const Consequence c = after(failure_of_link(up[0], up[1]));
    counted += c == Consequence::kSuspected ? 1 : 0;
  }
  EXPECT_GE(counted, 20);
}

// Its link to each of two others is bad, and the job needs two hosts.
TEST_F(CordoningTest, TheHostOfAllBadLinksIsCordonedInPlaceOfItsPeers) {
  pb::Job job = small_job();
  job.mutable_elastic()->set_min_slots(2);
  const MeshPolicy two(job, std::nullopt);
  run_on({"a", "b", "c"});
  const auto broken = [&](const char* a, const char* b) {
    Cordoning c({.view = view(),
                 .policy = two,
                 .elastic = job.elastic(),
                 .faults = durable.mutable_host_faults()});
    c.after(failure_of_link(a, b));
    changes_ = c.changes();
  };
  for (int i = 0; i < 2; ++i) broken("host-a", "host-b");
  EXPECT_EQ(begun(), Hosts{"host-b"});
  for (int i = 0; i < 2; ++i) broken("host-a", "host-c");
  EXPECT_EQ(begun(), Hosts{"host-a"});
  EXPECT_FALSE(is_cordoned(durable.host_faults(), "host-b"));
}

TEST_F(CordoningTest, HostsOfStepsAreProven) {
  run_on({"a", "b"});
  EXPECT_TRUE(cordoning().after_step(/*first=*/true))
      << "the next coordinator must know it";
  EXPECT_FALSE(cordoning().after_step(/*first=*/true));
  EXPECT_TRUE(is_proven(durable.host_faults(), "host-a"));
  EXPECT_TRUE(is_proven(durable.host_faults(), "host-b"));
  EXPECT_FALSE(is_proven(durable.host_faults(), "host-c"));
}

TEST_F(CordoningTest, AHostWithoutRoomIsCordonedUnlessItHoldsAState) {
  run_on({"a", "b"});
  const Shortages shortages = {{"host-b", {.needed = 2, .available = 1}}};
  pb::StateHolding* held =
      durable.mutable_assignment()->mutable_source()->add_states();
  held->set_host("host-b");
  Cordoning needed = cordoning();
  EXPECT_FALSE(needed.for_room(
      {.assignment = durable.assignment(), .short_of = shortages}));
  EXPECT_FALSE(needed.changes().any);
  held->set_host("host-a");
  Cordoning spare = cordoning();
  EXPECT_TRUE(spare.for_room(
      {.assignment = durable.assignment(), .short_of = shortages}));
  EXPECT_TRUE(is_cordoned(durable.host_faults(), "host-b"));
  Cordoning rest = cordoning();
  EXPECT_FALSE(rest.for_room({.short_of = {{"host-a", {}}}}))
      << "no mesh would be left";
}

// Training continues from the other copy, where there is room.
TEST_F(CordoningTest, AHostWithoutRoomIsCordonedIfOthersHoldItsState) {
  run_on({"a", "b"});
  pb::Assignment a;
  pb::StateHolding held;
  held.set_generation(1);
  held.set_step(5);
  held.set_host("host-b");
  *a.mutable_source()->add_states() = held;
  for (const int64_t step : {4, 5}) {
    pb::Report r = report("a", 0);
    held.set_step(step);
    *r.add_holdings() = held;
    hear(r);
    EXPECT_EQ(cordoning().for_room(
                  {.assignment = a, .short_of = {{"host-b", {2, 1}}}}),
              step == 5);
  }
}

TEST_F(CordoningTest, HostsThatCannotLoadAStateMakeWayForOthers) {
  run_on({"a", "b"});
  durable.mutable_refusals()->add_checkpoints("step-1");
  EXPECT_FALSE(cordoning().for_loading(durable.mutable_refusals()))
      << "none has failed";
  const pb::Cause unloaded = cause("what: 'x' exit_code: 65 hosts: 'host-a'");
  suspect({.host = "host-a"}, unloaded, 0, 0, durable.mutable_host_faults());
  Cordoning c = cordoning();
  EXPECT_TRUE(c.for_loading(durable.mutable_refusals()));
  EXPECT_TRUE(is_cordoned(durable.host_faults(), "host-a"));
  suspect({.host = "host-b"}, unloaded, 0, 0, durable.mutable_host_faults());
  EXPECT_EQ(durable.refusals().ByteSizeLong(), 0U);
  EXPECT_FALSE(cordoning().for_loading(durable.mutable_refusals()))
      << "nothing is refused";
  durable.mutable_refusals()->add_checkpoints("step-1");
  EXPECT_FALSE(cordoning().for_loading(durable.mutable_refusals()))
      << "all have tried";
}

TEST_F(CordoningTest, ASearchForALinkEndsWithTheStepOfAllItsHosts) {
  run_on({"a", "b", "c", "d"});
  const pb::Cause hang =
      cause("what: 'x' between: ['host-a', 'host-b', 'host-c', 'host-d']");
  EXPECT_EQ(after(hang), Consequence::kSuspected) << "one message, perhaps";
  EXPECT_TRUE(changes_.tests.empty());
  EXPECT_EQ(after(hang), Consequence::kCordoned);
  ASSERT_EQ(changes_.tests.size(), 1U);
  EXPECT_GT(changes_.tests[0].apart_size(), 0);
  Cordoning c = cordoning();
  EXPECT_TRUE(c.after_step(/*first=*/true));
  EXPECT_TRUE(c.changes().any);
  EXPECT_FALSE(durable.host_faults().has_link_search());
}

// The mesh without it makes a step, so it is on the link, and the others are
// needed.
TEST_F(CordoningTest, ASearchForALinkBeginsWithTheHostThatIsNotProven) {
  run_on({"a", "b", "c"});
  for (const char* host : {"host-a", "host-b"})
    durable.mutable_host_faults()->add_proven(host);
  const pb::Cause hang =
      cause("what: 'x' between: ['host-a', 'host-b', 'host-c']");
  for (int i = 0; i < 2; ++i) after(hang);
  ASSERT_EQ(changes_.tests.size(), 1U);
  EXPECT_EQ(
      Hosts(changes_.tests[0].apart().begin(), changes_.tests[0].apart().end()),
      Hosts{"host-c"});
  pb::HostFaults faults = durable.host_faults();
  durable = running({"a", "b"});
  *durable.mutable_host_faults() = faults;
  Cordoning c = cordoning();
  EXPECT_TRUE(c.after_step(/*first=*/true));
  changes_ = c.changes();
  EXPECT_EQ(begun(), Hosts{"host-c"});
  EXPECT_FALSE(durable.host_faults().has_link_search());
}

// They are gone, or were drained: it makes steps.
TEST_F(CordoningTest, AHostWhoseRanksDiedInTrainingIsUsedIfThereAreNoOthers) {
  cordon({.host = "host-a", .in_training = true}, {}, 0,
         durable.mutable_host_faults());
  wait_with({"a"});
  now_ms_ = 4999;
  EXPECT_FALSE(ends_in_time()) << "a worker may have been restarted";
  now_ms_ = 5000;
  durable.set_phase(pb::Durable::ABORTING);
  EXPECT_FALSE(ends_in_time());
  durable.set_phase(pb::Durable::WAITING);
  EXPECT_TRUE(ends_in_time());
  ASSERT_EQ(changes_.ended.size(), 1U);
  EXPECT_EQ(changes_.ended[0].host(), "host-a");
  EXPECT_FALSE(is_cordoned(durable.host_faults(), "host-a"));
}

TEST_F(CordoningTest, ACordonedHostIsNotUsedIfThereAreOthers) {
  cordon({.host = "host-a", .in_training = true}, {}, 0,
         durable.mutable_host_faults());
  wait_with({"a", "b"});
  EXPECT_FALSE(ends_in_time());
  durable.mutable_host_faults()->mutable_cordons(0)->set_host("host-x");
  wait_with({});
  job_.mutable_elastic()->set_min_slots(3);
  policy_ = MeshPolicy(job_, std::nullopt);
  EXPECT_FALSE(ends_in_time()) << "there is no mesh with it";
}

// What a failed start costs is paid by nobody then.
TEST_F(CordoningTest, AHostThatFailedToStartIsTriedSoonerIfThereAreNoOthers) {
  pb::Cause hang = no_start();
  hang.set_cost_s(30);
  cordon({.host = "host-a"}, hang, 0, durable.mutable_host_faults());
  EXPECT_EQ(remaining_s(durable.host_faults().cordons(0), 0), 300);
  wait_with({"a"});
  unix_s_ = 9;
  EXPECT_FALSE(ends_in_time());
  unix_s_ = 10;
  EXPECT_TRUE(ends_in_time());
}

TEST_F(CordoningTest, TheHostOfABadLinkIsUsedOnceItsPeerIsGone) {
  cordon({.host = "host-a", .peer = "host-b"}, {}, 0,
         durable.mutable_host_faults());
  wait_with({"a", "b"});
  job_.mutable_elastic()->set_min_slots(2);
  policy_ = MeshPolicy(job_, std::nullopt);
  EXPECT_FALSE(ends_in_time()) << "the mesh would have the link";
  durable.mutable_host_faults()->mutable_cordons(0)->set_peer("host-c");
  EXPECT_TRUE(ends_in_time());
}

// Those first that made steps, and no more than are needed.
TEST_F(CordoningTest, OnlyTheCordonsThatAMeshNeedsToEndDo) {
  pb::HostFaults* faults = durable.mutable_host_faults();
  for (const char* host : {"host-a", "host-b", "host-c"})
    cordon({.host = host}, {}, 0, faults);
  faults->mutable_cordons(1)->set_in_training(true);
  wait_with({"a", "b", "c"});
  unix_s_ = 9;
  EXPECT_TRUE(ends_in_time());
  EXPECT_FALSE(is_cordoned(*faults, "host-b"));
  EXPECT_EQ(faults->cordons_size(), 2);
}

TEST_F(CordoningTest, ASearchForALinkEndsIfTheRestCannotRunTheJob) {
  durable.mutable_host_faults()->mutable_link_search()->add_apart("host-a");
  durable.mutable_host_faults()->mutable_link_search()->set_until(600);
  wait_with({"a"});
  EXPECT_TRUE(ends_in_time());
  EXPECT_TRUE(changes_.search_ended);
  EXPECT_FALSE(is_cordoned(durable.host_faults(), "host-a"));
}

TEST_F(CordoningTest, IsLiftedByTheNameOfAHostOrOfAWorkerOnIt) {
  run_on({"a", "b"});
  cordon({.host = "host-a"}, no_start(), 0, durable.mutable_host_faults());
  const auto unknown = cordoning().lift("b");
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.status().message(),
            "'b' is not cordoned; cordoned: host-a");
  const auto host = cordoning().lift("a");
  ASSERT_TRUE(host.ok());
  EXPECT_EQ(*host, Site{.host = "host-a"});
  EXPECT_FALSE(is_cordoned(durable.host_faults(), "host-a"));
  cordon({.host = "host-a", .worker = "gone"}, no_start(), 0,
         durable.mutable_host_faults());
  EXPECT_FALSE(cordoning().lift("a").ok()) << "another worker of the host";
  EXPECT_OK(cordoning().lift("gone"));
}

TEST_F(CordoningTest, OfOneWorkerIsLiftedAlone) {
  run_on({"a", "b"});
  pb::HostFaults* faults = durable.mutable_host_faults();
  for (const char* worker : {"a", "v"}) {
    const Site site{.host = "host-a", .worker = worker};
    suspect(site, no_start(), 0, 0, faults);
    cordon(site, no_start(), 0, faults);
  }
  const auto lifted = cordoning().lift("a");
  ASSERT_TRUE(lifted.ok());
  EXPECT_EQ(*lifted, (Site{.host = "host-a", .worker = "a"}));
  EXPECT_FALSE(is_cordoned(*faults, "host-a", "a"));
  EXPECT_TRUE(is_cordoned(*faults, "host-a", "v"));
  EXPECT_EQ(faults->suspects_size(), 1) << "its failures are forgotten";
  EXPECT_TRUE(cordoning().lift("host-a").ok());
  EXPECT_FALSE(is_cordoned(*faults, "host-a", "v")) << "all of the host";
}

}  // namespace
}  // namespace remesh::core
