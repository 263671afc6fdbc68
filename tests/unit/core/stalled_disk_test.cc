// Time in which the storage did not answer is nobody's silence and no hang, and
// what it cannot read is no failure of the job.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "proto/base/exit_code.h"
#include "tests/unit/core/one_worker.h"

namespace remesh::core {
namespace {

constexpr int64_t kDeadAfterMs = 2000;
constexpr int64_t kHangAfterMs = 5000;

// A worker whose rank has finished a step.
class StalledDisk : public testing::Test {
 protected:
  void SetUp() override {
    w_.run({});
    report(pb::Report::RUNNING);
    ASSERT_EQ(w_.phase(), pb::Durable::RUNNING);
    ASSERT_EQ(losses(), std::vector<std::string>{});
  }
  static Options options() {
    Options o = OneWorker::options();
    o.job.mutable_elastic()->set_dead_after_ms(kDeadAfterMs);
    o.job.mutable_elastic()->set_hang_after_s(kHangAfterMs / 1000.0);
    return o;
  }
  static pb::RankStatus rank_at(int64_t step) {
    pb::RankStatus s;
    s.set_rank(0);
    s.set_progress(1);
    s.set_committed_step(step);
    return s;
  }
  void report(pb::Report::State state) {
    if (state == pb::Report::RUNNING)
      w_.report(state, rank_at(1));
    else
      w_.report(state);
  }
  // In which the storage answers or not, and the worker reports or not.
  void pass(int64_t ms, bool stalled, bool reports) {
    const int64_t wait_ms = stalled ? 50 : 0;
    for (const int64_t until = w_.now() + ms; w_.now() < until;) {
      w_.tick({.unwritten_ms = wait_ms, .stalled_ms = wait_ms});
      if (reports) report(pb::Report::RUNNING);
    }
  }
  // The events that somebody is lost or has failed.
  std::vector<std::string> losses() const {
    std::vector<std::string> out;
    for (const std::string& e : w_.events)
      if (e == "worker_lost" || e == "failure") out.push_back(e);
    return out;
  }

  OneWorker w_{options()};
};

TEST_F(StalledDisk, DeclaresNoWorkerSilent) {
  pass(60'000, /*stalled=*/true, /*reports=*/false);
  EXPECT_EQ(losses(), std::vector<std::string>{});
  pass(kDeadAfterMs + 100, /*stalled=*/false, /*reports=*/false);
  ASSERT_FALSE(losses().empty());
  EXPECT_EQ(losses()[0], "worker_lost");
}

TEST_F(StalledDisk, DeclaresNoRankHung) {
  pass(60'000, /*stalled=*/true, /*reports=*/true);
  EXPECT_EQ(w_.phase(), pb::Durable::RUNNING);
  pass(kHangAfterMs - 500, /*stalled=*/false, /*reports=*/true);
  EXPECT_EQ(w_.phase(), pb::Durable::RUNNING);
  pass(1000, /*stalled=*/false, /*reports=*/true);
  EXPECT_EQ(w_.phase(), pb::Durable::ABORTING);
}

// Much waits to be written: the workers keep further metrics.
TEST_F(StalledDisk, AFullBacklogTakesNoMoreMetrics) {
  const auto recorded = [&](int64_t step, bool full) {
    std::vector<int64_t> steps;
    const auto note = [&] {
      for (const AppendMetrics& a : all_of<AppendMetrics>(w_.last))
        steps.push_back(a.metrics.step());
    };
    w_.tick({.backlog_full = full});
    note();
    w_.report(pb::Report::RUNNING, rank_at(step), "a", /*loss=*/2);
    note();
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
  for (int i = 0; i < 50; ++i) w_.tick({.unwritten_ms = 50});
  ASSERT_FALSE(losses().empty());
  EXPECT_EQ(losses()[0], "worker_lost");
}

TEST_F(StalledDisk, AFullDiskBlamesNoWorkerThatWasNotTold) {
  w_.stop();
  ASSERT_EQ(w_.phase(), pb::Durable::ABORTING);
  const auto wait = [&](int64_t unwritten_ms) {
    for (int i = 0; i < 1000 && losses().empty(); ++i) {
      w_.tick({.unwritten_ms = unwritten_ms});
      report(pb::Report::RUNNING);
    }
  };
  wait(50);
  EXPECT_EQ(losses(), std::vector<std::string>{});
  wait(0);
  ASSERT_FALSE(losses().empty());
  EXPECT_EQ(losses()[0], "worker_lost");
}

TEST_F(StalledDisk, DelaysTheEndUntilTheWorkersCanBeTold) {
  w_.stop();
  report(pb::Report::QUIESCED);
  ASSERT_EQ(w_.phase(), pb::Durable::STOPPED);
  const auto wait = [&](int64_t unwritten_ms) {
    for (int i = 0; i < 1000 && !w_.ended(); ++i) {
      w_.tick({.unwritten_ms = unwritten_ms});
      report(pb::Report::QUIESCED);
    }
  };
  wait(50);
  EXPECT_FALSE(w_.ended());
  wait(0);
  EXPECT_TRUE(w_.ended());
}

// As on a bad disk: an older checkpoint is tried now and then, and the job ends
// for none of it.
TEST(UnreadableInputs, AnOlderCheckpointIsTriedAfterAWhile) {
  CheckpointsScanned scan;
  scan.valid.push_back({.step = 5, .generation = 1, .path = "step-5"});
  scan.valid.push_back({.step = 10, .generation = 1, .path = "step-10"});
  for (const bool older : {true, false}) {
    OneWorker w(/*max_same=*/1);
    if (!older) scan.valid.erase(scan.valid.begin());
    for (int i = 0; i < 45; ++i) {
      w.run(scan);
      ASSERT_EQ(w.phase(), pb::Durable::RUNNING) << i;
      EXPECT_EQ(w.durable().assignment().source().step(),
                older && (i == 20 || i == 40) ? 5 : 10)
          << i;
      w.fail(kExitUnreadable, 10);
      ASSERT_EQ(w.phase(), pb::Durable::WAITING) << i;
      w.pass(31'000);
    }
    EXPECT_EQ(w.durable().budget().failures(), 0);
    EXPECT_EQ(std::ranges::count(w.events, "waiting_for_inputs"), 45);
  }
}

}  // namespace
}  // namespace remesh::core
