// Time in which the storage did not answer is nobody's silence and no hang.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "coordinator/core/coordinator.h"

namespace remesh::core {
namespace {

constexpr int64_t kDeadAfterMs = 2000;
constexpr int64_t kHangAfterMs = 5000;

// A worker whose rank has finished a step.
class StalledDisk : public testing::Test {
 protected:
  void SetUp() override {
    Options o;
    o.job.mutable_train()->set_steps(1000);
    o.job.mutable_train()->set_global_batch_size(4);
    o.job.mutable_train()->set_local_batch_size(1);
    o.job.mutable_elastic()->set_join_window_ms(0);
    o.job.mutable_elastic()->set_dead_after_ms(kDeadAfterMs);
    o.job.mutable_elastic()->set_hang_after_s(kHangAfterMs / 1000.0);
    core_.emplace(std::move(o));
    take(core_->start(now_));
    report(pb::Report::IDLE);
    take(core_->on(CheckpointsScanned{}, now_));
    report(pb::Report::PREPARED);
    report(pb::Report::RUNNING);
    ASSERT_EQ(core_->durable().phase(), pb::Durable::RUNNING);
    ASSERT_EQ(events_, std::vector<std::string>{});
  }
  pb::Report running(int64_t step) {
    pb::Report r = of_state(pb::Report::RUNNING);
    r.mutable_ranks(0)->set_committed_step(step);
    return r;
  }
  void report(pb::Report::State state) {
    take(core_->on(ReportReceived{of_state(state)}, now_));
  }
  pb::Report of_state(pb::Report::State state) {
    pb::Report r;
    r.set_worker("a");
    r.set_incarnation(1);
    r.set_seq(++seq_);
    r.set_host("h");
    r.set_slots(1);
    r.set_cores(1);
    r.set_generation(core_->durable().generation());
    r.set_state(state);
    if (state == pb::Report::RUNNING) {
      pb::RankStatus* s = r.add_ranks();
      s->set_rank(0);
      s->set_progress(1);
      s->set_committed_step(1);
    }
    return r;
  }
  // In which the storage answers or not, and the worker reports or not.
  void pass(int64_t ms, bool stalled, bool reports) {
    for (const int64_t until = now_ + ms; now_ < until;) {
      now_ += 50;
      const int64_t wait_ms = stalled ? 50 : 0;
      take(core_->on(Tick{wait_ms, wait_ms}, now_));
      if (reports) report(pb::Report::RUNNING);
    }
  }
  void take(const std::vector<Action>& actions) {
    for (const Action& a : actions)
      if (const auto* e = std::get_if<EmitEvent>(&a))
        if (const auto& name = e->record.event();
            name == "worker_lost" || name == "failure")
          events_.push_back(name);
    aborting_ = core_->durable().phase() != pb::Durable::RUNNING;
  }

  std::optional<Coordinator> core_;
  int64_t now_ = 0;
  uint64_t seq_ = 0;
  std::vector<std::string> events_;  // that somebody is lost or has failed
  bool aborting_ = false;
};

TEST_F(StalledDisk, DeclaresNoWorkerSilent) {
  pass(60'000, /*stalled=*/true, /*reports=*/false);
  EXPECT_EQ(events_, std::vector<std::string>{});
  pass(kDeadAfterMs + 100, /*stalled=*/false, /*reports=*/false);
  ASSERT_FALSE(events_.empty());
  EXPECT_EQ(events_[0], "worker_lost");
}

TEST_F(StalledDisk, DeclaresNoRankHung) {
  pass(60'000, /*stalled=*/true, /*reports=*/true);
  EXPECT_FALSE(aborting_);
  pass(kHangAfterMs - 500, /*stalled=*/false, /*reports=*/true);
  EXPECT_FALSE(aborting_);
  pass(1000, /*stalled=*/false, /*reports=*/true);
  EXPECT_TRUE(aborting_);
}

// Much waits to be written: the workers keep further metrics.
TEST_F(StalledDisk, AFullBacklogTakesNoMoreMetrics) {
  const auto recorded = [&](int64_t step, bool full) {
    Tick tick;
    tick.backlog_full = full;
    now_ += 50;
    std::vector<Action> actions = core_->on(tick, now_);
    pb::Report r = running(step);
    pb::StepMetrics* m = r.add_metrics();
    m->set_generation(r.generation());
    m->set_step(step);
    for (Action& a : core_->on(ReportReceived{r}, now_))
      actions.push_back(std::move(a));
    std::vector<int64_t> steps;
    for (const Action& a : actions)
      if (const auto* x = std::get_if<AppendMetrics>(&a))
        steps.push_back(x->metrics.step());
    return steps;
  };
  using Steps = std::vector<int64_t>;
  EXPECT_EQ(recorded(2, true), Steps());
  EXPECT_EQ(recorded(3, true), Steps());
  EXPECT_EQ(recorded(4, false), (Steps{2, 3, 4}));
}

// A full disk answers: who is silent is silent. But nobody who was not told is
// late.
TEST_F(StalledDisk, AFullDiskHidesNoSilence) {
  for (int i = 0; i < 50; ++i)
    take(core_->on(Tick{.unwritten_ms = 50}, now_ += 50));
  ASSERT_FALSE(events_.empty());
  EXPECT_EQ(events_[0], "worker_lost");
}

TEST_F(StalledDisk, AFullDiskBlamesNoWorkerThatWasNotTold) {
  pb::Command stop;
  stop.set_kind(pb::Command::STOP);
  stop.set_discard(true);
  take(core_->on(CommandReceived{1, stop}, now_));
  ASSERT_EQ(core_->durable().phase(), pb::Durable::ABORTING);
  const auto wait = [&](int64_t unwritten_ms) {
    for (int i = 0; i < 1000 && events_.empty(); ++i) {
      take(core_->on(Tick{.unwritten_ms = unwritten_ms}, now_ += 50));
      report(pb::Report::RUNNING);
    }
  };
  wait(50);
  EXPECT_EQ(events_, std::vector<std::string>{});
  wait(0);
  ASSERT_FALSE(events_.empty());
  EXPECT_EQ(events_[0], "worker_lost");
}

TEST_F(StalledDisk, DelaysTheEndUntilTheWorkersCanBeTold) {
  pb::Command stop;
  stop.set_kind(pb::Command::STOP);
  stop.set_discard(true);
  take(core_->on(CommandReceived{1, stop}, now_));
  report(pb::Report::QUIESCED);
  ASSERT_EQ(core_->durable().phase(), pb::Durable::STOPPED);
  const auto wait = [&](int64_t unwritten_ms) {
    for (int i = 0; i < 1000 && !core_->ended(); ++i) {
      take(core_->on(Tick{.unwritten_ms = unwritten_ms}, now_ += 50));
      report(pb::Report::QUIESCED);
    }
  };
  wait(50);
  EXPECT_FALSE(core_->ended());
  wait(0);
  EXPECT_TRUE(core_->ended());
}

}  // namespace
}  // namespace remesh::core
