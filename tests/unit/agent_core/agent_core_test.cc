// Invariants of the agent under any order of events, including events that no
// coordinator would send.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <set>
#include <vector>

#include "proto/limits/plausible.h"
#include "tests/testing/seed.h"
#include "tests/testing/text_message.h"
#include "worker/agent/core/agent.h"
#include "worker/agent/core/silence.h"

namespace remesh::agent {
namespace {

constexpr uint64_t kJob = 0xABC;

pb::Report worker_a() {
  return text_message<pb::Report>(
      "worker: 'a' incarnation: 1 host: 'h' slots: 1 cores: 1");
}

// A rank of generation 1 that has made these steps.
RankSample rank_0_after(int64_t steps) {
  RankSample s;
  s.status.set_rank(0);
  for (int64_t step = 1; step <= steps; ++step) {
    s.steps.emplace_back();
    s.steps.back().set_step(step);
    s.steps.back().set_generation(1);
  }
  return s;
}

pb::Directive directive(uint64_t seq, int64_t generation,
                        pb::Directive::Goal goal, int ranks) {
  auto d = text_message<pb::Directive>("worker: 'a' incarnation: 1 epoch: 1");
  d.set_seq(seq);
  d.set_generation(generation);
  d.set_goal(goal);
  d.set_state_job(kJob);
  if (goal == pb::Directive::PREPARE) {
    d.mutable_assignment()->set_generation(generation);
    for (int r = 0; r < ranks; ++r) {
      d.mutable_assignment()->add_ranks()->set_rank(r);
      d.mutable_assignment()->mutable_ranks(r)->set_worker("a");
    }
  }
  return d;
}

// A simulated shell: the live ranks and the pending answers.
struct Shell {
  std::set<int> alive;
  int64_t generation = 0;
  bool killed = false;
  bool tear_down = false;
  std::set<int64_t> spawned;
  std::set<int64_t> gone;  // generations torn down
  // Version of the states in memory; every action of a rank changes it.
  int64_t states = 0;
  std::optional<InventoryTaken> inventory;  // requested, not yet delivered
};

class RandomAgent {
 public:
  explicit RandomAgent(uint64_t seed) : rng_(seed) {}

  // Number of reports with an inventory.
  int64_t run() {
    for (int i = 0; i < 400 && !testing::Test::HasFatalFailure(); ++i) {
      now_ += static_cast<int64_t>(rng_() % 40);
      one_event();
      if (agent_.exited()) break;
    }
    return inventories_;
  }

 private:
  uint64_t below(uint64_t n) { return rng_() % n; }

  void one_event() {
    if (!shell_.alive.empty()) ++shell_.states;
    switch (below(9)) {
      case 0:
      case 1:
      case 2:
        return any_directive();
      case 3:
        return on(Tick{});
      case 4:
        if (shell_.alive.empty()) return;
        // It ends by itself, with or without an error, or because it was
        // killed.
        return exit_one(shell_.killed ? 9 : 0, static_cast<int>(below(2)));
      case 5:
        if (!shell_.killed || shell_.alive.empty()) return;
        return exit_one(9, 0);
      case 6:
        if (!shell_.tear_down) return;
        shell_.tear_down = false;
        shell_.gone.insert(shell_.generation);
        return on(TornDown{shell_.generation});
      case 7: {
        if (!shell_.inventory) return;
        const InventoryTaken taken = *shell_.inventory;
        shell_.inventory.reset();
        return on(taken);
      }
      default:
        if (below(4) == 0 && !shell_.alive.empty() && shell_.gone.empty()) {
          shell_.alive.clear();
          return on(SpawnFailed{shell_.generation, -1, "no such file"});
        }
        return on(LocalFence{shell_.generation, 0, "x"});
    }
  }

  void any_directive() {
    static constexpr pb::Directive::Goal kGoals[] = {
        pb::Directive::IDLE, pb::Directive::PREPARE, pb::Directive::PREPARE,
        pb::Directive::RUN,  pb::Directive::RUN,     pb::Directive::FINISH,
        pb::Directive::ABORT};
    if (below(4) == 0) ++generation_;
    // Sometimes an older or reordered one.
    const int64_t g = generation_ - static_cast<int64_t>(below(4) == 0);
    const uint64_t seq = below(5) == 0 ? seq_ - below(seq_) : ++seq_;
    pb::Directive d =
        directive(seq, g, kGoals[below(7)], static_cast<int>(below(3)));
    if (below(20) == 0) d.set_state_job(below(2));  // of another job, or none
    on(DirectiveReceived{d});
  }

  void exit_one(int signal, int code) {
    const int rank = *shell_.alive.begin();
    shell_.alive.erase(rank);
    RankExited e{.generation = shell_.generation,
                 .rank = rank,
                 .exit_code = code,
                 .signal = signal};
    e.sample.status.set_rank(rank);
    on(e);
  }

  void on(const Event& event) {
    for (const Action& a : agent_.on(event, now_)) check(a);
  }

  void check(const Action& action) {
    if (const auto* s = std::get_if<Spawn>(&action)) {
      const int64_t g = s->assignment.generation();
      ASSERT_TRUE(shell_.alive.empty()) << "two generations at once";
      ASSERT_TRUE(shell_.spawned.empty() || g > *shell_.spawned.rbegin())
          << "generation " << g << " after a younger one, or twice";
      ASSERT_EQ(shell_.spawned.size(), shell_.gone.size());
      shell_.spawned.insert(g);
      shell_.generation = g;
      shell_.killed = false;
      for (const pb::RankPlace& p : s->assignment.ranks())
        shell_.alive.insert(p.rank());
    } else if (const auto* k = std::get_if<KillRanks>(&action)) {
      ASSERT_EQ(k->generation, shell_.generation);
      shell_.killed = true;
    } else if (const auto* t = std::get_if<TearDown>(&action)) {
      ASSERT_EQ(t->generation, shell_.generation);
      ASSERT_TRUE(shell_.alive.empty()) << "torn down with ranks alive";
      ASSERT_FALSE(shell_.tear_down) << "torn down twice";
      shell_.tear_down = true;
    } else if (const auto* i = std::get_if<TakeInventory>(&action)) {
      ASSERT_TRUE(shell_.alive.empty()) << "ranks change what is listed";
      InventoryTaken taken{.job = i->job, .generation = i->generation};
      taken.holdings.emplace_back();
      taken.holdings[0].set_step(shell_.states);
      taken.holdings[0].set_model(i->job);
      shell_.inventory = taken;
    } else if (const auto* s = std::get_if<Send>(&action)) {
      if (s->message.has_report()) check_report(s->message.report());
    }
  }

  void check_report(const pb::Report& r) {
    ASSERT_GE(r.generation(), reported_generation_);
    reported_generation_ = r.generation();
    const bool open = shell_.spawned.size() > shell_.gone.size();
    ASSERT_EQ(r.busy(), open);
    if (r.state() == pb::Report::PREPARED) {
      ASSERT_FALSE(open);
    }
    ASSERT_EQ(r.has_inventory(), r.holdings_size() == 1);
    if (r.has_inventory()) {
      ASSERT_FALSE(open) << "ranks change what is told";
      ASSERT_EQ(r.holdings(0).step(), shell_.states) << "states of before";
      ++inventories_;
    }
    if (r.state() == pb::Report::QUIESCED &&
        shell_.spawned.contains(r.generation())) {
      ASSERT_TRUE(shell_.gone.contains(r.generation()))
          << "quiesced before it was torn down";
    }
  }

  std::mt19937_64 rng_;
  Agent agent_{worker_a()};
  Shell shell_;
  int64_t now_ = 0;
  int64_t generation_ = 1;
  uint64_t seq_ = 1;
  int64_t reported_generation_ = 0;
  int64_t inventories_ = 0;
};

// Nor does it ever report states that are not in memory.
TEST(Agent, NeverReportsQuiescedBeforeItsRanksAndNamespaceAreGone) {
  const uint64_t first = test_seed();
  int64_t inventories = 0;
  for (uint64_t seed = first; seed < first + 500; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    inventories += RandomAgent(seed).run();
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(inventories, 5000);
}

// -------------------------------------------------------- a rank by hand

template <typename A>
std::vector<A> of(const std::vector<Action>& actions) {
  std::vector<A> out;
  for (const Action& a : actions)
    if (const A* x = std::get_if<A>(&a)) out.push_back(*x);
  return out;
}

// The only action, or message, of a kind.
template <typename T>
T only(const std::vector<T>& all) {
  EXPECT_EQ(all.size(), 1U);
  return all.empty() ? T() : all[0];
}

std::vector<pb::Report> reports_in(const std::vector<Action>& actions) {
  std::vector<pb::Report> out;
  for (const Send& s : of<Send>(actions))
    if (s.message.has_report()) out.push_back(s.message.report());
  return out;
}
std::vector<pb::FenceIn> fences_in(const std::vector<Action>& actions) {
  std::vector<pb::FenceIn> out;
  for (const Send& s : of<Send>(actions))
    if (s.message.has_fence_in()) out.push_back(s.message.fence_in());
  return out;
}

// An agent whose ranks the test controls.
class AgentTest : public ::testing::Test {
 protected:
  std::vector<Action> on(const Event& e) { return agent_.on(e, now_); }
  std::vector<Action> direct(pb::Directive::Goal goal, int64_t generation,
                             bool save = true, uint64_t job = kJob) {
    pb::Directive d = directive(++seq_, generation, goal, 1);
    d.set_save(save);
    d.set_state_job(job);
    return on(DirectiveReceived{d});
  }
  // The number of the request to save that the ranks then see; -1: none.
  int64_t request(pb::Directive::Goal goal, uint64_t epoch, int64_t number) {
    pb::Directive d = directive(++seq_, 1, goal, 1);
    d.set_epoch(epoch);
    d.set_checkpoint_request(number);
    const auto sent = of<SetRequest>(on(DirectiveReceived{d}));
    return sent.empty() ? -1 : sent.back().checkpoint_request;
  }
  void start_rank(int64_t generation) {
    direct(pb::Directive::PREPARE, generation);
    const auto spawned =
        only(of<Spawn>(direct(pb::Directive::RUN, generation)));
    EXPECT_EQ(spawned.state_job, kJob);
    on(RankStarted{generation, 0, 4711});
  }
  // Everything that follows the exit of the rank.
  std::vector<Action> end_rank(int64_t generation, int code, int64_t states) {
    RankExited e{.generation = generation, .exit_code = code};
    e.sample.status.set_rank(0);
    std::vector<Action> out = on(e);
    const auto asked = of<TakeInventory>(out);
    EXPECT_EQ(asked.size(), 1u);
    if (!asked.empty()) tell(asked[0], states);
    return on(TornDown{generation});
  }
  std::vector<Action> tell(const TakeInventory& asked, int64_t states) {
    InventoryTaken taken{.job = asked.job, .generation = asked.generation};
    taken.holdings.resize(static_cast<size_t>(states));
    return on(taken);
  }
  std::optional<Exit> exit_within(int64_t ms) {
    const int64_t end = now_ + ms;
    while (now_ < end) {
      now_ += 100;
      const auto exits = of<Exit>(on(Tick{}));
      if (!exits.empty()) return only(exits);
    }
    return std::nullopt;
  }

  Agent agent_{worker_a()};
  int64_t now_ = 0;
  uint64_t seq_ = 0;
};

TEST_F(AgentTest, AHandoffSavesNothing) {
  start_rank(1);
  const auto finish = [&](bool save) {
    return only(of<SetRequest>(direct(pb::Directive::FINISH, 1, save))).bits;
  };
  EXPECT_EQ(finish(/*save=*/true), 1u);
  EXPECT_EQ(finish(/*save=*/false), 1u | 4u);
}

// Not even the generation, which a goal of today raises.
TEST_F(AgentTest, AGoalOfALaterProtocolChangesNothing) {
  start_rank(1);
  EXPECT_TRUE(of<KillRanks>(direct(pb::Directive::UNKNOWN, 2)).empty());
  EXPECT_EQ(only(of<SetRequest>(direct(pb::Directive::FINISH, 1))).bits, 1U);
}

TEST_F(AgentTest, APauseOfTheHostIsNoSilence) {
  start_rank(1);
  const auto killed = [&](int64_t ms) {
    bool any = false;
    for (const int64_t end = now_ + ms; now_ < end; now_ += 100)
      any = any || !of<KillRanks>(on(Tick{})).empty();
    return any;
  };
  EXPECT_FALSE(killed(1'000));
  now_ += 500'000;
  EXPECT_FALSE(killed(50'000));
  EXPECT_TRUE(killed(20'000)) << "nobody was heard for a minute";
}

// Ranks are given up after a minute in which neither the coordinator was heard
// nor a step made; a pause of the host counts for neither.
TEST_F(AgentTest, APauseIsNeitherSilenceNorStandstill) {
  for (const bool stands : {false, true}) {
    SCOPED_TRACE(stands);
    agent_ = Agent(worker_a());
    start_rank(1);
    RankSample s;
    s.status.set_rank(0);
    const auto killed = [&](int64_t ms, bool heard, bool moves) {
      bool any = false;
      for (const int64_t end = now_ + ms; now_ < end; now_ += 100) {
        if (heard) direct(pb::Directive::RUN, 1);
        if (moves) s.status.set_progress(s.status.progress() + 1);
        any = any || !of<KillRanks>(on(Tick{{s}})).empty();
      }
      return any;
    };
    // One of the two clocks is 40 s old, and the other one decides.
    EXPECT_FALSE(killed(40'000, /*heard=*/stands, /*moves=*/!stands));
    now_ += 500'000;
    EXPECT_FALSE(killed(55'000, false, false));
    EXPECT_TRUE(killed(10'000, false, false));
  }
}

TEST_F(AgentTest, APauseWhileItLeavesIsNoSilence) {
  start_rank(1);
  on(Tick{});
  on(Terminate{});
  now_ += 500'000;
  EXPECT_TRUE(of<SetRequest>(on(Tick{})).empty());
  EXPECT_FALSE(exit_within(1000));
}

TEST_F(AgentTest, WhatIsForAnotherWorkerHasNoEffect) {
  start_rank(1);
  for (const bool other_life : {false, true}) {
    pb::Directive d = directive(++seq_, 1, pb::Directive::SHUTDOWN, 1);
    if (other_life)
      d.set_incarnation(2);
    else
      d.set_worker("b");
    const auto actions = on(DirectiveReceived{d});
    EXPECT_TRUE(of<KillRanks>(actions).empty());
    EXPECT_TRUE(of<SetRequest>(actions).empty());
  }
  now_ += 1000;
  EXPECT_EQ(only(reports_in(on(Tick{}))).state(), pb::Report::RUNNING);
}

// A job that trains for long without a coordinator.
TEST_F(AgentTest, StepsThatNobodyHearsAreBounded) {
  constexpr int64_t kKept = 100'000, kSteps = kKept + 10;
  start_rank(1);
  now_ += 1000;
  const auto report = only(reports_in(on(Tick{{rank_0_after(kSteps)}})));
  ASSERT_EQ(report.metrics_size(), limits::kMaxMetrics);
  EXPECT_EQ(report.metrics(0).step(), kSteps - kKept + 1);
}

// Each coordinator counts requests from 0; the ranks' numbers only grow.
TEST_F(AgentTest, ANewCoordinatorsRequestsToSaveAreServed) {
  start_rank(1);
  const auto asks = [&](uint64_t epoch, int64_t number) {
    return request(pb::Directive::RUN, epoch, number);
  };
  EXPECT_EQ(asks(1, 1), 1);
  EXPECT_EQ(asks(1, 2), 2);
  EXPECT_EQ(asks(2, 0), -1) << "nothing was asked of the new one";
  EXPECT_EQ(asks(2, 1), 3);
  EXPECT_EQ(asks(3, 1), 4) << "asked before this worker heard of it";
}

// The coordinator hears of it while RUN waits for the journal.
TEST_F(AgentTest, ASaveThatIsRequestedWithRunIsServed) {
  request(pb::Directive::PREPARE, 1, 4);  // of generations before
  EXPECT_EQ(request(pb::Directive::RUN, 1, 5), 1);
}

TEST_F(AgentTest, ARunByAnotherCoordinatorIsNoRequestToSave) {
  request(pb::Directive::PREPARE, 1, 4);
  EXPECT_EQ(request(pb::Directive::RUN, 2, 0), 0);
  EXPECT_EQ(request(pb::Directive::RUN, 2, 1), 1);
}

TEST_F(AgentTest, MeasuresTheHardwareOnceAndReportsItOnRequest) {
  const auto ask = [&](bool want) {
    pb::Directive d = directive(++seq_, 0, pb::Directive::IDLE, 1);
    d.set_want_hardware(want);
    now_ += 1000;
    return on(DirectiveReceived{d});
  };
  const auto reported = [](const std::vector<Action>& actions) {
    const auto reports = reports_in(actions);
    return reports.empty() ? "no report" : reports.back().hardware();
  };
  EXPECT_TRUE(of<MeasureHardware>(ask(false)).empty());
  EXPECT_EQ(of<MeasureHardware>(ask(true)).size(), 1U);
  EXPECT_TRUE(of<MeasureHardware>(ask(true)).empty()) << "it is measuring";
  EXPECT_EQ(reported(on(HardwareMeasured{"fast"})), "fast");
  EXPECT_EQ(reported(ask(true)), "fast");
  EXPECT_TRUE(of<MeasureHardware>(ask(true)).empty());
  EXPECT_EQ(reported(ask(false)), "");
}

TEST_F(AgentTest, ReportsWhyTheHardwareIsNotKnown) {
  pb::Directive d = directive(++seq_, 0, pb::Directive::IDLE, 1);
  d.set_want_hardware(true);
  on(DirectiveReceived{d});
  const auto report = only(reports_in(on(HardwareMeasured{.error = "broken"})));
  EXPECT_FALSE(report.has_hardware());
  EXPECT_EQ(report.hardware_error(), "broken");
  d.set_seq(++seq_);
  EXPECT_TRUE(of<MeasureHardware>(on(DirectiveReceived{d})).empty());
}

TEST_F(AgentTest, ReportsItsHoldingsBeforeAnAssignmentAndWithQuiesced) {
  const auto asked = only(of<TakeInventory>(direct(pb::Directive::IDLE, 0)));
  EXPECT_EQ(asked.job, kJob);
  EXPECT_EQ(only(reports_in(tell(asked, 2))).holdings_size(), 2);
  start_rank(1);
  now_ += 1000;
  auto report = only(reports_in(on(Tick{})));
  EXPECT_FALSE(report.has_inventory());
  EXPECT_EQ(report.holdings_size(), 0);
  report = only(reports_in(end_rank(1, 0, 3)));
  EXPECT_EQ(report.state(), pb::Report::QUIESCED);
  EXPECT_TRUE(report.has_inventory());
  EXPECT_EQ(report.holdings_size(), 3);
}

TEST_F(AgentTest, AnotherJobNeedsANewInventory) {
  tell(only(of<TakeInventory>(direct(pb::Directive::IDLE, 0))), 2);
  const auto none = direct(pb::Directive::IDLE, 0, true, 0);
  EXPECT_TRUE(of<TakeInventory>(none).empty());
  now_ += 1000;
  EXPECT_FALSE(reports_in(on(Tick{})).at(0).has_inventory());
  EXPECT_EQ(only(of<TakeInventory>(direct(pb::Directive::IDLE, 0))).job, kJob);
}

TEST_F(AgentTest, StaysUntilItsStatesAreNotNeeded) {
  start_rank(1);
  direct(pb::Directive::FINISH, 1, /*save=*/false);
  end_rank(1, 0, 1);
  on(Terminate{});
  // While the coordinator answers.
  for (int i = 0; i < 50; ++i) {
    EXPECT_FALSE(exit_within(1000));
    direct(pb::Directive::FINISH, 1, /*save=*/false);
  }
  const auto exit = only(of<Exit>(direct(pb::Directive::LEAVE, 1)));
  EXPECT_EQ(exit.code, 0);
  EXPECT_EQ(exit.states, States::kRemoved);
}

TEST_F(AgentTest, TheEndOfTheJobRemovesItsStates) {
  const auto exit = only(of<Exit>(direct(pb::Directive::SHUTDOWN, 0)));
  EXPECT_EQ(exit.states, States::kRemovedForAll);
  EXPECT_EQ(exit.state_job, kJob);
}

TEST_F(AgentTest, KeepsStatesThatTheEndedJobMayContinueFrom) {
  pb::Directive d = directive(++seq_, 0, pb::Directive::SHUTDOWN, 1);
  d.set_keep_states(true);
  d.set_state_job(kJob);
  const auto exit = only(of<Exit>(on(DirectiveReceived{d})));
  EXPECT_EQ(exit.code, 0);
  EXPECT_EQ(exit.states, States::kKept);
}

TEST_F(AgentTest, ARefusalForAnotherJobEndsOnlyAWorkerWithoutOne) {
  Agent stranger{worker_a()};
  const Refused other{"wrong job", pb::Refusal::OTHER_JOB};
  const auto exit = only(of<Exit>(stranger.on(other, now_)));
  EXPECT_EQ(exit.code, 3);
  EXPECT_EQ(exit.message, "wrong job");
  direct(pb::Directive::IDLE, 0);
  EXPECT_TRUE(of<Exit>(on(other)).empty());
  EXPECT_FALSE(agent_.ends());
}

TEST_F(AgentTest, AWorkerThatMayBeTakenLaterKeepsReporting) {
  Agent stranger{worker_a()};
  for (const auto kind : {pb::Refusal::RETRY, pb::Refusal::UNKNOWN}) {
    EXPECT_TRUE(of<Exit>(stranger.on(Refused{"not now", kind}, now_)).empty());
    EXPECT_FALSE(stranger.ends());
  }
}

// The coordinator was replaced by one that this worker cannot speak with.
TEST_F(AgentTest, APermanentlyRefusedWorkerLeaves) {
  direct(pb::Directive::IDLE, 0);
  EXPECT_TRUE(
      of<Exit>(on(Refused{"other protocol", pb::Refusal::PERMANENT})).empty());
  const auto exit = exit_within(50'000);
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 3);
  EXPECT_EQ(exit->message, "other protocol");
  EXPECT_EQ(exit->states, States::kKept);
}

// Its ranks may be saving.
TEST_F(AgentTest, OneTermAfterAPermanentRefusalIsNotTheSecond) {
  start_rank(1);
  on(Refused{"other protocol", pb::Refusal::PERMANENT});
  now_ += 5000;
  auto actions = on(Terminate{});
  EXPECT_TRUE(of<Exit>(actions).empty());
  EXPECT_TRUE(of<KillRanks>(actions).empty());
  now_ += 5000;
  actions = on(Terminate{});
  EXPECT_EQ(of<KillRanks>(actions).size(), 1u);
  EXPECT_EQ(of<Exit>(actions).at(0).code, 130);
}

// MPI_Finalize has fence 2, too: the ranks of others wait in it until a
// restarted coordinator has everybody's contribution again.
TEST_F(AgentTest, RepeatsItsFencesAfterItsRanksHaveEnded) {
  start_rank(1);
  on(LocalFence{1, 2, "mine"});
  end_rank(1, 0, 1);
  pb::Directive d = directive(++seq_, 1, pb::Directive::RUN, 1);
  d.set_want_fences(true);
  EXPECT_EQ(only(fences_in(on(DirectiveReceived{d}))).blob(), "mine");
  start_rank(2);
  d = directive(++seq_, 2, pb::Directive::RUN, 1);
  d.set_want_fences(true);
  EXPECT_TRUE(fences_in(on(DirectiveReceived{d})).empty());
}

TEST_F(AgentTest, RanksAreReportedWithTheirOwnGeneration) {
  start_rank(1);
  now_ += 5000;
  const auto running = reports_in(on(Tick{}));
  ASSERT_FALSE(running.empty());
  EXPECT_EQ(running.back().ranks_size(), 1);
  direct(pb::Directive::PREPARE, 2);
  now_ += 5000;
  const auto fenced = reports_in(on(Tick{}));
  ASSERT_FALSE(fenced.empty());
  EXPECT_EQ(fenced.back().generation(), 2);
  EXPECT_EQ(fenced.back().ranks_size(), 0) << "they end, and are those of 1";
}

TEST_F(AgentTest, TheEndOfTheRunEndsTheRanksThenTheWorker) {
  start_rank(1);
  const auto ended = on(RunEnded{"stopped"});
  EXPECT_TRUE(of<Exit>(ended).empty());
  EXPECT_EQ(of<KillRanks>(ended).size(), 1u);
  end_rank(1, 0, 1);
  const auto exit = only(of<Exit>(on(RunEnded{"done"})));
  EXPECT_EQ(exit.code, 4);
  EXPECT_EQ(exit.states, States::kKept);
}

TEST_F(AgentTest, AFinishedRunNeedsNoStates) {
  direct(pb::Directive::IDLE, 0);
  const auto exit = only(of<Exit>(on(RunEnded{"done", /*done=*/true})));
  EXPECT_EQ(exit.states, States::kRemovedForAll);
  EXPECT_EQ(exit.state_job, kJob);
}

TEST_F(AgentTest, ReportsTheRoomForStatesIfItIsKnown) {
  direct(pb::Directive::IDLE, 0);
  now_ += 1000;
  EXPECT_FALSE(only(reports_in(on(Tick{}))).has_state_room());
  now_ += 1000;
  EXPECT_TRUE(only(reports_in(on(Tick{{}, 0}))).has_state_room())
      << "there is none left";
}

TEST_F(AgentTest, RemovedStatesAreNoLongerReported) {
  const auto asked = only(of<TakeInventory>(direct(pb::Directive::IDLE, 0)));
  tell(asked, 2);
  EXPECT_EQ(only(reports_in(tell(asked, 1))).holdings_size(), 1);
  EXPECT_TRUE(reports_in(tell(TakeInventory{kJob, 7}, 0)).empty());
}

TEST(SilenceWatch, WarnsEarlyThenLessAndLessOften) {
  SilenceWatch watch;
  std::vector<int64_t> warned;
  for (int64_t now = 0; now <= 2'000'000; now += 500)
    if (watch.due(0, now)) warned.push_back(now);
  const std::vector<int64_t> begin(warned.begin(), warned.begin() + 4);
  EXPECT_EQ(begin, (std::vector<int64_t>{3000, 9000, 21000, 45000}));
  EXPECT_EQ(warned.size(), 10u) << "at most every ten minutes";
  EXPECT_FALSE(watch.due(2'000'000, 2'002'999));
  EXPECT_TRUE(watch.due(2'000'000, 2'003'000)) << "a new silence";
}

TEST_F(AgentTest, KeepsAnUnsavedStateWhenTheCoordinatorIsGone) {
  start_rank(1);
  direct(pb::Directive::FINISH, 1, /*save=*/false);
  end_rank(1, 0, 1);
  on(Terminate{});
  const auto exit = exit_within(20'000);
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->states, States::kKept);
}

// The ranks may have agreed on a handoff before the request to save arrived.
TEST_F(AgentTest, KeepsAStateThatRanksMayNotHaveSaved) {
  start_rank(1);
  direct(pb::Directive::FINISH, 1, /*save=*/false);
  on(Terminate{});
  now_ += 20'000;
  EXPECT_EQ(of<SetRequest>(on(Tick{})).at(0).bits, 1u | 2u);
  end_rank(1, 0, 1);
  const auto exit = exit_within(20'000);
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->states, States::kKept);
}

// The worker itself requests the save.
class AloneTest : public AgentTest,
                  public ::testing::WithParamInterface<int> {};
TEST_P(AloneTest, RemovesItsStatesOnceTheyAreSaved) {
  start_rank(1);
  on(Terminate{});
  now_ += 20'000;
  EXPECT_EQ(only(of<SetRequest>(on(Tick{}))).bits, 1u | 2u);
  const int code = GetParam();
  end_rank(1, code, 1);
  const auto exit = exit_within(20'000);
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->states, code == 0 ? States::kRemoved : States::kKept);
}
INSTANTIATE_TEST_SUITE_P(ExitCodes, AloneTest, ::testing::Values(0, 68));

TEST_F(AgentTest, ASecondTermLeavesAtOnceAndKeepsTheStates) {
  start_rank(1);
  on(Terminate{});
  now_ += 999;  // a process and its group were signalled
  EXPECT_TRUE(of<Exit>(on(Terminate{})).empty());
  now_ += 1;
  const auto exit = only(of<Exit>(on(Terminate{})));
  EXPECT_EQ(exit.code, 130);
  EXPECT_EQ(exit.states, States::kKept);
}

TEST(Agent, RepeatsMetricsUntilTheyAreOnDisk) {
  Agent agent(worker_a());
  uint64_t seq = 0;
  const auto metrics = [](const std::vector<Action>& actions) {
    std::vector<int64_t> steps;
    for (const pb::Report& r : reports_in(actions))
      for (const auto& m : r.metrics()) steps.push_back(m.step());
    return steps;
  };
  agent.on(DirectiveReceived{directive(++seq, 1, pb::Directive::PREPARE, 1)},
           0);
  agent.on(DirectiveReceived{directive(++seq, 1, pb::Directive::RUN, 1)}, 0);
  EXPECT_EQ(metrics(agent.on(Tick{{rank_0_after(3)}}, 1000)),
            (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(metrics(agent.on(Tick{}, 2000)), (std::vector<int64_t>{1, 2, 3}));
  pb::Directive d = directive(++seq, 1, pb::Directive::RUN, 1);
  d.set_metrics_acked(2);
  agent.on(DirectiveReceived{d}, 2001);
  EXPECT_EQ(metrics(agent.on(Tick{}, 3000)), (std::vector<int64_t>{3}));
}

// Not every report includes them if they are many.
TEST(Agent, ReportsManyStepsOfAFencedGenerationNowAndThen) {
  Agent agent(worker_a());
  uint64_t seq = 0;
  const auto tell = [&](pb::Directive::Goal goal, int64_t g, int64_t now) {
    return agent.on(DirectiveReceived{directive(++seq, g, goal, 1)}, now);
  };
  const auto told = [](const std::vector<Action>& actions) {
    const auto reports = reports_in(actions);
    return reports.empty() ? -1 : reports.back().metrics_size();
  };
  tell(pb::Directive::PREPARE, 1, 0);
  tell(pb::Directive::RUN, 1, 0);
  agent.on(Tick{{rank_0_after(300)}}, 10);
  tell(pb::Directive::IDLE, 2, 1000);
  agent.on(RankExited{1, 0, 0, 9, 0, "", {}}, 1001);
  EXPECT_EQ(told(agent.on(TornDown{1}, 1002)), 300);
  EXPECT_EQ(told(agent.on(Tick{}, 2500)), 0);
  EXPECT_EQ(told(agent.on(Tick{}, 4000)), 300);
}

// A state of generation 1.
pb::StateHolding held(int64_t step) {
  auto h = text_message<pb::StateHolding>("generation: 1");
  h.set_step(step);
  return h;
}

// The coordinator may have been killed before it has recorded the steps of an
// older generation, which are those before a state that was restored.
TEST(Agent, ReportsTheStepsOfAFencedGenerationUntilTheyAreOnDisk) {
  Agent agent(worker_a());
  uint64_t seq = 0;
  const auto tell = [&](pb::Directive::Goal goal, int64_t g, int64_t now,
                        int64_t acked = 0) {
    pb::Directive d = directive(++seq, g, goal, 1);
    d.set_state_job(7);
    d.set_metrics_acked(acked);
    return agent.on(DirectiveReceived{d}, now);
  };
  const auto told = [](const std::vector<Action>& actions) {
    std::optional<std::vector<int64_t>> steps;
    for (const pb::Report& r : reports_in(actions)) {
      steps.emplace();
      for (const auto& m : r.metrics()) steps->push_back(m.step());
    }
    return steps;
  };
  using Steps = std::vector<int64_t>;
  tell(pb::Directive::PREPARE, 1, 0);
  tell(pb::Directive::RUN, 1, 0);
  agent.on(Tick{{rank_0_after(3)}}, 10);
  tell(pb::Directive::IDLE, 2, 1000);
  agent.on(RankExited{1, 0, 0, 9, 0, "", {}}, 1001);
  EXPECT_EQ(told(agent.on(TornDown{1}, 1002)), (Steps{1, 2, 3}));
  // Step 3 was not committed.
  EXPECT_EQ(told(agent.on(InventoryTaken{7, 1, {held(1), held(2)}, {}}, 1003)),
            (Steps{1, 2, 3}));
  EXPECT_EQ(told(agent.on(Tick{}, 2500)), (Steps{1, 2, 3}));
  // The next generation has restored step 1 in place, and step 2 is gone.
  tell(pb::Directive::PREPARE, 2, 5000);
  tell(pb::Directive::RUN, 2, 5001);
  agent.on(RankExited{2, 0, 0, 9, 0, "", {}}, 5002);
  agent.on(TornDown{2}, 5003);
  auto mine = held(1);
  mine.set_generation(2);
  EXPECT_EQ(told(agent.on(InventoryTaken{7, 2, {mine}, {}}, 5004)),
            (Steps{1, 2, 3}));
  tell(pb::Directive::IDLE, 2, 6000, 2);
  EXPECT_EQ(told(agent.on(Tick{}, 8500)), Steps{3});
}

// A coordinator may lose the journal, which says where generations continued.
TEST(Agent, ReportsWhereAGenerationContinuedUntilTheStepIsOnDisk) {
  Agent agent(worker_a());
  uint64_t seq = 0;
  const auto tell = [&](pb::Directive d, int64_t acked, int64_t now) {
    d.set_metrics_acked(acked);
    agent.on(DirectiveReceived{d}, now);
    std::vector<pb::Branches::Origin> told;
    for (const pb::Report& r : reports_in(agent.on(Tick{}, now + 1000)))
      told.assign(r.origins().begin(), r.origins().end());
    return told;
  };
  pb::Directive prepare = directive(++seq, 3, pb::Directive::PREPARE, 1);
  merge_text("kind: MEMORY step: 5 states { generation: 2 }",
             prepare.mutable_assignment()->mutable_source());
  EXPECT_EQ(tell(prepare, 4, 0).size(), 0U);
  const pb::Directive run = directive(++seq, 3, pb::Directive::RUN, 1);
  const auto told = tell(run, 4, 1000);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].generation(), 3);
  EXPECT_EQ(told[0].from(), 2);
  EXPECT_EQ(told[0].step(), 5);
  const pb::Directive later = directive(++seq, 3, pb::Directive::RUN, 1);
  EXPECT_EQ(tell(later, 5, 2000).size(), 0U);
}

}  // namespace
}  // namespace remesh::agent
