// What keeps the cost of a large job low must not change what is decided.
#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "coordinator/core/coordinator.h"
#include "coordinator/core/durable.h"
#include "coordinator/core/job_shape.h"
#include "parallel/geometry/schedule.h"
#include "tests/testing/expect.h"
#include "tests/testing/seed.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

bool says(const std::vector<Action>& actions, pb::Directive::Goal goal) {
  return std::any_of(actions.begin(), actions.end(), [&](const Action& a) {
    const auto* d = std::get_if<SendDirective>(&a);
    return d != nullptr && d->directive.goal() == goal;
  });
}

Options options(int64_t batch) {
  Options o{.job = text_message<pb::Job>(
                "train { steps: 10 local_batch_size: 1 } "
                "elastic { join_window_ms: 0 dead_after_ms: 5000 }")};
  o.job.mutable_train()->set_global_batch_size(batch);
  return o;
}

// One worker with a generation that is being prepared.
class Prepared : public testing::Test {
 protected:
  Prepared() {
    core_.emplace(options(1));
    (void)core_->start(0);
    (void)core_->on(next(pb::Report::IDLE), 1);
    (void)core_->on(CheckpointsScanned{}, 2);
    EXPECT_EQ(core_->durable().phase(), pb::Durable::PREPARING);
  }
  MessageReceived next(pb::Report::State state) {
    pb::Report r = report("a", ++seq_);
    r.set_generation(core_->durable().generation());
    r.set_state(state);
    return received(r);
  }
  std::optional<Coordinator> core_;
  uint64_t seq_ = 0;
};

TEST_F(Prepared, ABatchOfInputsIsDecidedOnce) {
  const auto taken = core_->take(next(pb::Report::PREPARED), 3);
  EXPECT_TRUE(taken.empty());
  EXPECT_TRUE(core_->take(next(pb::Report::PREPARED), 3).empty());
  EXPECT_EQ(core_->durable().phase(), pb::Durable::PREPARING);
  EXPECT_TRUE(says(core_->settle(4), pb::Directive::RUN));
  EXPECT_EQ(core_->durable().phase(), pb::Durable::RUNNING);
  EXPECT_TRUE(core_->settle(300).empty()) << "nothing was taken";
}

TEST_F(Prepared, OtherInputsSeeThePendingDecisions) {
  (void)core_->take(next(pb::Report::PREPARED), 3);
  pb::Command status;
  status.set_kind(pb::Command::STATUS);
  const auto actions = core_->on(CommandReceived{1, status}, 4);
  const auto reply = std::find_if(
      actions.begin(), actions.end(),
      [](const Action& a) { return std::holds_alternative<Respond>(a); });
  ASSERT_NE(reply, actions.end());
  EXPECT_EQ(std::get<Respond>(*reply).reply.status().state(),
            pb::JobStatus::RUNNING);
  EXPECT_TRUE(says({actions.begin(), reply}, pb::Directive::RUN));
}

// However many there are, the cluster is not looked at for any of them.
TEST_F(Prepared, AQuestionIsAnsweredWithoutADecision) {
  (void)core_->take(next(pb::Report::PREPARED), 3);
  pb::Command status;
  status.set_kind(pb::Command::STATUS);
  for (int i = 0; i < 100; ++i) {
    const auto actions = core_->take(CommandReceived{1, status}, 4);
    ASSERT_EQ(actions.size(), 1u);
    EXPECT_TRUE(std::holds_alternative<Respond>(actions[0]));
  }
  EXPECT_EQ(core_->durable().phase(), pb::Durable::PREPARING);
}

// All connections may be closed at once.
TEST_F(Prepared, ALostConnectionIsJudgedWithTheOthers) {
  EXPECT_TRUE(core_->take(PeerLost{"a", ""}, 3).empty());
  for (int64_t now_ms = 100; now_ms <= 600; now_ms += 100)
    (void)core_->on(Tick{}, now_ms);
  EXPECT_TRUE(core_->roster().considers_live("a", 1));
  (void)core_->on(Tick{}, 700);
  EXPECT_FALSE(core_->roster().considers_live("a", 1));
}

// The process was stopped between the two: nobody was listening.
TEST_F(Prepared, ALateDecisionDeclaresNobodyDead) {
  (void)core_->take(next(pb::Report::PREPARED), 3);
  (void)core_->settle(60'000);
  EXPECT_EQ(core_->durable().phase(), pb::Durable::RUNNING);
  EXPECT_TRUE(core_->roster().considers_live("a", 1));
}

// A plan has the place of every rank and state, and every worker is told it.
TEST(Directives, OfAGenerationShareItsPlan) {
  Coordinator core(options(2));
  (void)core.start(0);
  for (const char* worker : {"a", "b"})
    (void)core.on(received(report(worker, 1)), 1);
  std::vector<Action> actions = core.on(CheckpointsScanned{}, 2);
  for (Action& again : core.on(Tick{}, 290))
    actions.push_back(std::move(again));
  const std::string plan = core.durable().assignment().SerializeAsString();
  std::set<const pb::Assignment*> plans;
  std::multiset<std::string> told;
  for (const SendDirective& s : all_of<SendDirective>(actions)) {
    if (s.directive.goal() != pb::Directive::PREPARE) continue;
    EXPECT_FALSE(s.directive.has_assignment());
    EXPECT_EQ(s.with_assignment().assignment().SerializeAsString(), plan);
    plans.insert(s.assignment.get());
    told.insert(s.directive.worker());
  }
  EXPECT_EQ(told, (std::multiset<std::string>{"a", "a", "b", "b"}));
  EXPECT_EQ(plans.size(), 1U);
}

// Against a simulation of all of it.
TEST(ScheduledBubble, IsThatOfTheScheduleHoweverLong) {
  using geometry::ScheduleKind;
  for (const ScheduleKind kind :
       {ScheduleKind::kGpipe, ScheduleKind::k1F1B,
        ScheduleKind::kInterleaved1F1B, ScheduleKind::kZbH1})
    for (const int pp : {2, 3, 4}) {
      planner::JobShape shape;
      shape.schedule = kind;
      shape.chunks = kind == ScheduleKind::kInterleaved1F1B ? 3 : 1;
      const geometry::Layout l{.dp = 2, .pp = pp};
      SCOPED_TRACE(fmt::format("{} pp {}", geometry::schedule_name(kind), pp));
      for (int64_t n = 1; n <= 40; ++n) {
        shape.microbatches = n * l.dp;
        ASSERT_OK_AND(
            const auto whole,
            geometry::simulate(
                geometry::without_padding(planner::schedule_on(shape, l, n), n),
                {}));
        const bool padded = shape.chunks > 1 && n % pp != 0;
        EXPECT_NEAR(scheduled_bubble(shape, l), whole.bubble_share,
                    padded ? 0.01 : 1e-9)
            << n;
      }
      shape.microbatches = int64_t{1} << 40;
      EXPECT_NEAR(scheduled_bubble(shape, l), 0, 1e-6);
    }
}

// The queries by name against a look at every entry.
TEST(Durable, MembersAreFoundByName) {
  std::mt19937_64 rng(test_seed());
  for (int round = 0; round < 200; ++round) {
    std::vector<std::string> names;
    for (int i = 0; i < 12; ++i)
      if (rng() % 2 == 0) names.push_back(fmt::format("w{}", i));
    std::sort(names.begin(), names.end());
    pb::Durable d = running(names);
    for (pb::RankPlace& p : *d.mutable_assignment()->mutable_ranks())
      p.set_worker(names[rng() % names.size()]);
    if (rng() % 4 != 0) count_ranks(d.mutable_assignment());
    for (int i = 0; i < 12; ++i) {
      const std::string name = fmt::format("w{}", i);
      const auto& ranks = d.assignment().ranks();
      EXPECT_EQ(has_ranks(d, name),
                std::any_of(ranks.begin(), ranks.end(),
                            [&](const auto& p) { return p.worker() == name; }));
      const bool part =
          std::find(names.begin(), names.end(), name) != names.end();
      EXPECT_EQ(is_assigned(d.assignment(), name), part);
      EXPECT_EQ(participates(d, name, 1), part);
      EXPECT_FALSE(participates(d, name, 2));
    }
  }
}

}  // namespace
}  // namespace remesh::core
