#include "worker/train/boundary.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/testing/seed.h"

namespace remesh::train {
namespace {

using Answer = StopPolicy::Answer;

TEST(StopPolicy, ADeclinedStopIsForgottenUntilRequestedAgain) {
  StopPolicy p;
  EXPECT_EQ(p.on_step({}), Answer::kContinue);
  EXPECT_FALSE(p.saves());
  EXPECT_EQ(p.on_step({.stop = 1, .stop_saves = 1}), Answer::kStop);
  EXPECT_TRUE(p.saves());
  p.declined();
  EXPECT_EQ(p.on_step({.stop = 2, .stop_saves = 2}), Answer::kContinue);
  EXPECT_FALSE(p.saves());
  EXPECT_EQ(p.on_step({.stop = 2, .must_stop = 1, .stop_saves = 2}),
            Answer::kMustStop);
  EXPECT_TRUE(p.saves());
  EXPECT_EQ(p.on_step({.stop = 1, .stop_saves = 1}), Answer::kContinue);
  EXPECT_EQ(p.on_step({}), Answer::kContinue);
  EXPECT_EQ(p.on_step({.stop = 1, .stop_saves = 1}), Answer::kStop);
}

TEST(StopPolicy, AHandoffSavesNothingAndIsNeverDeclined) {
  StopPolicy p;
  EXPECT_EQ(p.on_step({.stop = 1}), Answer::kStop);
  EXPECT_FALSE(p.saves());
  EXPECT_EQ(p.on_step({.stop = 1, .must_stop = 1}), Answer::kMustStop);
  EXPECT_FALSE(p.saves());
  // A request to one rank is enough.
  EXPECT_EQ(p.on_step({.stop = 3, .stop_saves = 1}), Answer::kStop);
  EXPECT_TRUE(p.saves());
  p.declined();
  EXPECT_EQ(p.on_step({.stop = 3, .stop_saves = 1}), Answer::kContinue);
  EXPECT_EQ(p.on_step({.stop = 3}), Answer::kStop);
  EXPECT_FALSE(p.saves());
  // One that saves is still declined.
  EXPECT_EQ(p.on_step({.stop = 3, .stop_saves = 1}), Answer::kContinue);
}

TEST(SavePlan, BeginsWhenDueAndCommitsWhenAllAreDone) {
  SavePlan p({.interval = 2, .world = 3});
  EXPECT_FALSE(p.on_step(1, {}, false).begin);
  EXPECT_TRUE(p.on_step(2, {}, false).begin);
  EXPECT_FALSE(p.on_step(3, {.shard_saved = 2}, false).commit);
  const auto d = p.on_step(4, {.shard_saved = 3}, false);
  EXPECT_TRUE(d.commit);
  EXPECT_TRUE(d.skipped);
  EXPECT_FALSE(d.begin);
  EXPECT_FALSE(p.on_step(5, {}, false).ended.has_value());
  const auto e = p.on_step(6, {.committed = 1}, false);
  EXPECT_EQ(e.ended, true);
  EXPECT_EQ(e.ended_step, 2);
  EXPECT_TRUE(e.begin);
  EXPECT_EQ(p.saved_step(), 2);
}

TEST(SavePlan, OneFailedShardAbandonsTheSave) {
  SavePlan p({.interval = 1, .world = 2});
  EXPECT_TRUE(p.on_step(1, {}, false).begin);
  // Nothing may be removed while the other rank still writes.
  EXPECT_FALSE(p.on_step(2, {.shard_failed = 1}, false).abandon);
  const auto d = p.on_step(3, {.shard_saved = 1, .shard_failed = 1}, false);
  EXPECT_TRUE(d.abandon);
  EXPECT_FALSE(d.commit);
  EXPECT_EQ(p.on_step(4, {.gave_up = 1}, false).ended, false);
  EXPECT_EQ(p.saved_step(), -1);
}

TEST(SavePlan, ARequestedCheckpointWaitsItsTurnAndIsSavedOnce) {
  SavePlan p({.interval = 0, .world = 1});
  EXPECT_TRUE(p.on_step(1, {.checkpoint_request = 1}, false).begin);
  // A second one is requested while the first is being written.
  auto d = p.on_step(2, {.shard_saved = 1, .checkpoint_request = 2}, false);
  EXPECT_FALSE(d.begin);
  EXPECT_FALSE(d.skipped);
  d = p.on_step(3, {.committed = 1, .checkpoint_request = 2}, false);
  EXPECT_TRUE(d.begin);
  p.on_step(4, {.shard_saved = 1, .checkpoint_request = 2}, false);
  d = p.on_step(5, {.committed = 1, .checkpoint_request = 2}, false);
  EXPECT_FALSE(d.begin);
}

TEST(SavePlan, ASkippedSaveIsMadeUpAndAFailedOneIsNot) {
  SavePlan p({.interval = 10, .world = 1});
  EXPECT_TRUE(p.on_step(10, {}, false).begin);
  EXPECT_FALSE(p.on_step(19, {}, false).skipped);
  EXPECT_TRUE(p.on_step(20, {}, false).skipped);
  EXPECT_FALSE(p.on_step(21, {.shard_saved = 1}, false).skipped);
  auto d = p.on_step(22, {.committed = 1}, false);
  EXPECT_TRUE(d.begin);
  EXPECT_EQ(p.saving_step(), 22);
  // It fails: the next save is at step 30.
  p.on_step(23, {.shard_failed = 1}, false);
  d = p.on_step(24, {.gave_up = 1}, false);
  EXPECT_EQ(d.ended, false);
  EXPECT_FALSE(d.begin);
  EXPECT_FALSE(p.on_step(29, {}, false).begin);
  EXPECT_TRUE(p.on_step(30, {}, false).begin);
}

// A save that the previous generation began and did not finish.
TEST(SavePlan, AnInterruptedSaveIsMadeUpByTheNextGeneration) {
  SavePlan p({.interval = 10, .world = 1, .saved_step = 10});
  EXPECT_EQ(p.saved_step(), 10);
  EXPECT_TRUE(p.on_step(24, {}, false).begin);
  SavePlan q({.interval = 10, .world = 1, .saved_step = 20});
  EXPECT_FALSE(q.on_step(24, {}, false).begin);
  EXPECT_TRUE(q.on_step(30, {}, false).begin);
  // No checkpoint at all: the run has never saved.
  SavePlan r({.interval = 10, .world = 1});
  EXPECT_FALSE(r.on_step(9, {}, false).begin);
  EXPECT_TRUE(r.on_step(14, {}, false).begin);
}

// For any disks and handoffs: every multiple of the interval is followed by
// exactly one save, which begins there or as soon as the previous one is done.
TEST(SavePlan, EveryMultipleHasItsSaveAcrossGenerations) {
  const unsigned seed = test_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 rng(seed);
  const auto upto = [&](int n) { return static_cast<int>(rng() % n); };
  for (int round = 0; round < 300; ++round) {
    const int64_t interval = 1 + upto(7);
    int64_t step = 0, committed = -1;
    while (step < 200) {
      SavePlan p({.interval = interval, .world = 1, .saved_step = committed});
      int64_t covered = std::max<int64_t>(committed, 0) / interval;
      int left = 0;
      for (const int64_t end = step + 1 + upto(40); step < end;) {
        ++step;
        StepVotes agreed;
        if (p.phase() != SavePlan::Phase::kIdle && left-- <= 0)
          (p.phase() == SavePlan::Phase::kWriting ? agreed.shard_saved
                                                  : agreed.committed) = 1;
        const auto d = p.on_step(step, agreed, false);
        if (d.ended) committed = d.ended_step;
        if (d.commit) left = upto(3);
        const bool wanted = step / interval > covered;
        ASSERT_FALSE(d.begin && !wanted) << step;
        ASSERT_FALSE(wanted && !d.begin && p.phase() == SavePlan::Phase::kIdle)
            << step;
        if (!d.begin) continue;
        covered = step / interval;
        left = upto(9);
      }
    }
  }
}

TEST(SavePlan, NoSaveBeginsWhereAllRanksStop) {
  SavePlan p({.interval = 1, .world = 1});
  EXPECT_FALSE(p.on_step(1, {.checkpoint_request = 1}, true).begin);
  EXPECT_EQ(p.phase(), SavePlan::Phase::kIdle);
}

// Ranks with disks of any speed: saves never overlap, each ends, and each due
// save begins or is reported as skipped.
TEST(SavePlan, AnyDiskSpeedsKeepTheOrder) {
  const unsigned seed = test_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 rng(seed);
  const auto upto = [&](int n) { return static_cast<int>(rng() % n); };
  for (int round = 0; round < 200; ++round) {
    const int world = 1 + upto(4);
    SavePlan p({.interval = 1 + upto(5), .world = world});
    std::vector<int> left(static_cast<size_t>(world), -1);
    int ending = -1, begun = 0, ended = 0;
    bool will_commit = false;
    int fails = 0;
    for (int64_t step = 1; step < 100; ++step) {
      StepVotes agreed;
      if (p.phase() == SavePlan::Phase::kWriting)
        for (int r = 0; r < world; ++r)
          if (left[static_cast<size_t>(r)]-- <= 0)
            (r < fails ? agreed.shard_failed : agreed.shard_saved) += 1;
      if (p.phase() == SavePlan::Phase::kEnding && ending-- <= 0)
        (will_commit ? agreed.committed : agreed.gave_up) = 1;
      const auto before = p.phase();
      const auto d = p.on_step(step, agreed, false);
      if (d.commit || d.abandon) {
        EXPECT_EQ(d.commit, fails == 0);
        EXPECT_EQ(before, SavePlan::Phase::kWriting);
        will_commit = d.commit;
        ending = upto(3);
      }
      if (d.ended) {
        EXPECT_EQ(*d.ended, will_commit);
        ++ended;
      }
      if (d.begin) {
        EXPECT_EQ(++begun, ended + 1);
        for (int& l : left) l = upto(6);
        fails = upto(5) == 0 ? 1 : 0;
      }
    }
    EXPECT_GE(begun, 2);
  }
}

}  // namespace
}  // namespace remesh::train
