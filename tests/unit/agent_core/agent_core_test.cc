// What the agent keeps true for any order of events, also ones that no
// coordinator would send.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "worker/agent/core/agent.h"

namespace remesh::agent {
namespace {

pb::Directive directive(uint64_t seq, int64_t generation,
                        pb::Directive::Goal goal, int ranks) {
  pb::Directive d;
  d.set_worker("a");
  d.set_incarnation(1);
  d.set_epoch(1);
  d.set_seq(seq);
  d.set_generation(generation);
  d.set_goal(goal);
  if (goal == pb::Directive::PREPARE) {
    d.mutable_assignment()->set_generation(generation);
    for (int r = 0; r < ranks; ++r) {
      d.mutable_assignment()->add_ranks()->set_rank(r);
      d.mutable_assignment()->mutable_ranks(r)->set_worker("a");
    }
  }
  return d;
}

// The shell's side: which ranks live, what is to be answered.
struct Shell {
  std::set<int> alive;
  int64_t generation = 0;
  bool killed = false;
  bool tear_down = false;
  std::set<int64_t> spawned;
  std::set<int64_t> gone;  // generations torn down
};

class RandomAgent {
 public:
  explicit RandomAgent(uint64_t seed) : rng_(seed) {}

  void run() {
    for (int i = 0; i < 400 && !testing::Test::HasFatalFailure(); ++i) {
      now_ += static_cast<int64_t>(rng_() % 40);
      one_event();
      if (agent_.exited()) return;
    }
  }

 private:
  uint64_t below(uint64_t n) { return rng_() % n; }

  void one_event() {
    switch (below(8)) {
      case 0:
      case 1:
      case 2:
        return any_directive();
      case 3:
        return on(Tick{});
      case 4:
        if (shell_.alive.empty()) return;
        // By itself, in order or not; or as told.
        return exit_one(shell_.killed ? 9 : 0, static_cast<int>(below(2)));
      case 5:
        if (!shell_.killed || shell_.alive.empty()) return;
        return exit_one(9, 0);
      case 6:
        if (!shell_.tear_down) return;
        shell_.tear_down = false;
        shell_.gone.insert(shell_.generation);
        return on(TornDown{shell_.generation});
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
    // Sometimes an older one, or one that was overtaken.
    const int64_t g = generation_ - static_cast<int64_t>(below(4) == 0);
    const uint64_t seq = below(5) == 0 ? seq_ - below(seq_) : ++seq_;
    on(DirectiveReceived{
        directive(seq, g, kGoals[below(7)], static_cast<int>(below(3)))});
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
    } else if (const auto* r = std::get_if<SendReport>(&action)) {
      check_report(r->report);
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
    if (r.state() == pb::Report::QUIESCED &&
        shell_.spawned.contains(r.generation())) {
      ASSERT_TRUE(shell_.gone.contains(r.generation()))
          << "quiesced before it was torn down";
    }
  }

  std::mt19937_64 rng_;
  Agent agent_{Options{.worker = "a", .incarnation = 1, .host = "h"}};
  Shell shell_;
  int64_t now_ = 0;
  int64_t generation_ = 1;
  uint64_t seq_ = 1;
  int64_t reported_generation_ = 0;
};

TEST(Agent, NeverSaysQuiescedBeforeItsRanksAndNamespaceAreGone) {
  const uint64_t first = std::random_device{}();
  for (uint64_t seed = first; seed < first + 500; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    RandomAgent(seed).run();
    if (HasFatalFailure()) return;
  }
}

TEST(Agent, RepeatsMetricsUntilTheyAreOnDisk) {
  Agent agent(Options{.worker = "a", .incarnation = 1, .host = "h"});
  uint64_t seq = 0;
  const auto metrics = [](const std::vector<Action>& actions) {
    std::vector<int64_t> steps;
    for (const Action& a : actions)
      if (const auto* r = std::get_if<SendReport>(&a))
        for (const auto& m : r->report.metrics()) steps.push_back(m.step());
    return steps;
  };
  agent.on(DirectiveReceived{directive(++seq, 1, pb::Directive::PREPARE, 1)},
           0);
  agent.on(DirectiveReceived{directive(++seq, 1, pb::Directive::RUN, 1)}, 0);
  RankSample s;
  s.status.set_rank(0);
  for (int64_t step = 1; step <= 3; ++step) {
    s.steps.emplace_back();
    s.steps.back().set_step(step);
  }
  EXPECT_EQ(metrics(agent.on(Tick{{s}}, 1000)),
            (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(metrics(agent.on(Tick{}, 2000)), (std::vector<int64_t>{1, 2, 3}));
  pb::Directive d = directive(++seq, 1, pb::Directive::RUN, 1);
  d.set_metrics_acked(2);
  agent.on(DirectiveReceived{d}, 2001);
  EXPECT_EQ(metrics(agent.on(Tick{}, 3000)), (std::vector<int64_t>{3}));
}

}  // namespace
}  // namespace remesh::agent
