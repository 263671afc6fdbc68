// When a state is looked for from which the next generation starts.
#include "coordinator/core/gathering.h"

#include <gtest/gtest.h>

#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

constexpr int64_t kJoinWindowMs = 1000;

class GatheringTest : public ::testing::Test, protected RosterFixture {
 protected:
  GatheringTest() {
    job_.mutable_elastic()->set_join_window_ms(kJoinWindowMs);
    policy_.emplace(job_, std::nullopt);
  }
  Gathering::Next next(int64_t now_ms, bool job_finished = false) {
    gathering_.observe(roster, now_ms);
    ClusterView now = view(now_ms);
    now.joined_by_ms = gathering_.joined_by_ms(now_ms);
    return gathering_.next(now, *policy_, retention_, recovery_, job_finished);
  }

  pb::Job job_ = small_job();
  std::optional<MeshPolicy> policy_;
  const StateRetention retention_{job_.elastic(), /*keeps_state=*/false};
  const Recovery recovery_{job_, std::nullopt};
  Gathering gathering_{kJoinWindowMs};
};

TEST_F(GatheringTest, LooksForAStateOnceNobodyHasJoinedForSomeTime) {
  const auto none = next(0);
  EXPECT_FALSE(none.scan);
  EXPECT_FALSE(none.impossible);
  EXPECT_TRUE(none.no_mesh);
  EXPECT_FALSE(next(50).no_mesh) << "it was announced";
  hear_all({"a"}, 100);
  EXPECT_FALSE(next(100 + kJoinWindowMs - 1).scan) << "more may join";
  EXPECT_TRUE(next(100 + kJoinWindowMs).scan);
  EXPECT_FALSE(next(5000).scan) << "it was asked for";
  EXPECT_TRUE(gathering_.end_scan());
  EXPECT_FALSE(gathering_.end_scan());
  EXPECT_TRUE(next(5000).scan);
}

TEST_F(GatheringTest, AnnouncesAnotherOfferAndNotAnotherSentence) {
  pb::Cordon* const cordon = durable.mutable_host_faults()->add_cordons();
  cordon->set_host("a-host");
  cordon->set_reason("rank 0 failed");
  const auto first = next(0);
  ASSERT_TRUE(first.no_mesh);
  cordon->set_reason("the same in other words");
  EXPECT_FALSE(next(10).no_mesh);
  EXPECT_NE(gathering_.waiting_for().text, *first.no_mesh) << "status has it";
  cordon->set_host("another-host");
  EXPECT_TRUE(next(20).no_mesh);
  gathering_.wait_for({.reason = pb::JobStatus::FINISHED_STEPS});
  EXPECT_TRUE(next(30).no_mesh) << "it waited for something else meanwhile";
}

TEST_F(GatheringTest, WaitsForAMeshOnlyWhileThereIsNone) {
  (void)next(0);
  EXPECT_EQ(gathering_.waiting_for().reason, pb::JobStatus::WORKERS);
  hear_all({"a"}, 100);
  (void)next(100);
  EXPECT_EQ(gathering_.waiting_for().reason, pb::JobStatus::NOTHING);
  gathering_.wait_for({.reason = pb::JobStatus::FINISHED_STEPS});
  roster.on_disconnect("a", 200, "revoked");
  roster.expire(durable, /*dead_after_ms=*/60'000, 200);
  EXPECT_TRUE(next(200).no_mesh);
  EXPECT_EQ(gathering_.waiting_for().reason, pb::JobStatus::WORKERS);
  Gathering stops = gathering_;  // it asks for no mesh meanwhile
  stops.wait_for({.reason = pb::JobStatus::FINISHED_STEPS});
  EXPECT_EQ(stops.waiting_for().reason, pb::JobStatus::FINISHED_STEPS);
  hear_all({"a"}, 300);
  (void)next(300);
  EXPECT_EQ(gathering_.waiting_for().reason, pb::JobStatus::FINISHED_STEPS);
}

TEST_F(GatheringTest, DoesNotWaitForWorkersThatJoinWithoutEnd) {
  for (int64_t now_ms = 0; now_ms <= 10 * kJoinWindowMs; now_ms += 500) {
    hear_all({"w" + std::to_string(now_ms)}, now_ms);
    EXPECT_EQ(next(now_ms).scan, now_ms == 10 * kJoinWindowMs) << now_ms;
  }
}

// The reports of a long time were heard at once.
TEST_F(GatheringTest, AStallOfTheCoordinatorIsNoTimeOfJoins) {
  (void)next(0);
  hear_all({"a"}, 100);
  (void)next(100);
  const int64_t stalled_until = 100 + 20 * kJoinWindowMs;
  hear_all({"b"}, stalled_until);
  (void)next(stalled_until);
  EXPECT_EQ(gathering_.joined_by_ms(stalled_until), INT64_MAX);
  EXPECT_FALSE(next(stalled_until + kJoinWindowMs - 1).scan) << "more may join";
}

TEST_F(GatheringTest, AfterAFailureOnlyTheBackOffCounts) {
  hear_all({"a"}, 100);
  gathering_.end_generation({.backoff_ms = 250, .no_room = true}, 200);
  EXPECT_FALSE(gathering_.replicas_fit());
  EXPECT_FALSE(next(449).scan);
  EXPECT_TRUE(next(450).scan) << "although more may join";
  gathering_.begin_generation();
  EXPECT_TRUE(gathering_.replicas_fit());
}

TEST_F(GatheringTest, LooksForTheLastCheckpointOnceWithoutAnyWorker) {
  gathering_.back_off(100);
  EXPECT_FALSE(next(99, /*job_finished=*/true).scan);
  EXPECT_TRUE(next(100, /*job_finished=*/true).scan);
  EXPECT_TRUE(gathering_.end_scan());
  EXPECT_FALSE(next(200, /*job_finished=*/true).scan);
}

}  // namespace
}  // namespace remesh::core
