// Whose memory is still needed, and when it must be saved before a stop.
#include "coordinator/core/state_retention.h"

#include <optional>
#include <set>
#include <string>

#include "coordinator/core/mesh_policy.h"
#include "tests/testing/expect.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

class StateRetentionTest : public ::testing::Test, protected RosterFixture {
 protected:
  ClusterView view_at(int64_t last_finished, int64_t saved_step) const {
    return {.roster = roster,
            .durable = durable,
            .last_finished = last_finished,
            .saved_step = saved_step};
  }
  MeshPolicy policy{small_job(), std::nullopt};
};

TEST_F(StateRetentionTest, TheSourceIsNeededUntilALaterStepIsCommitted) {
  durable = running({"a"});
  merge_text("source { kind: MEMORY step: 3 states { worker: 'b' } }",
             durable.mutable_assignment());
  hear(running_report("a", 0, 0, 2));
  hear(report("b", 0));
  roster.drain("b");
  StateRetention retention(small_job().elastic(), /*keeps_state=*/true);
  const auto needs_b = [&] {
    retention.observe(view());
    return retention.needs_memory_of(view_at(3, -1), policy, "b");
  };
  EXPECT_TRUE(needs_b());
  EXPECT_EQ(retention.missing_holders(view()), std::set<std::string>{});
  hear(running_report("a", 0, 0, 4));
  EXPECT_FALSE(needs_b());
  retention.begin_generation();
  EXPECT_FALSE(StateRetention(small_job().elastic(), false)
                   .needs_memory_of(view_at(3, -1), policy, "b"));
}

// Another worker's copy of the state is what protects it until then, and a
// worker that was just fenced has not listed its states yet.
TEST_F(StateRetentionTest, AWorkerWithoutAnInventoryIsNeeded) {
  durable = running({"a"});
  merge_text("source { kind: MEMORY step: 3 states { worker: 'a' } }",
             durable.mutable_assignment());
  hear(running_report("a", 0, 0, 2));
  pb::Report r = report("b", 0);
  r.clear_has_inventory();
  hear(r);
  const StateRetention retention(small_job().elastic(), true);
  EXPECT_TRUE(retention.needs_memory_of(view_at(3, -1), policy, "b"));
  r.set_has_inventory(true);
  hear(r);
  EXPECT_FALSE(retention.needs_memory_of(view_at(3, -1), policy, "b"));
}

// Step 9 may become complete when a missing worker returns.
TEST_F(StateRetentionTest,
       AStateNewerThanTheSourceIsNeededUntilAStepIsFinished) {
  durable = running({"a"});
  merge_text("source { kind: CHECKPOINT step: 3 }",
             durable.mutable_assignment());
  hear(running_report("a", 0, 0, 3));
  pb::Report r = report("b", 0);
  merge_text("has_inventory: true holdings { step: 3 }", &r);
  hear(r);
  StateRetention retention(small_job().elastic(), true);
  const auto needs_b = [&] {
    retention.observe(view());
    return retention.needs_memory_of(view_at(3, 3), policy, "b");
  };
  EXPECT_FALSE(needs_b());
  r.add_holdings()->set_step(9);
  hear(r);
  EXPECT_TRUE(needs_b());
  hear(running_report("a", 0, 0, 4));
  EXPECT_FALSE(needs_b());
}

// The numbers of the last steps are heard late, or never.
TEST_F(StateRetentionTest, AStateBeyondTheKnownStepsIsNeeded) {
  durable.set_phase(pb::Durable::WAITING);
  pb::Report r = report("a", 0);
  merge_text("has_inventory: true holdings { step: 9 }", &r);
  hear(r);
  const StateRetention retention(small_job().elastic(), true);
  EXPECT_TRUE(retention.needs_memory_of(view_at(3, 5), policy, "a"));
  EXPECT_FALSE(retention.needs_memory_of(view_at(3, 9), policy, "a"));
}

// After steps were lost nobody has the last finished one.
// The drained worker has the only copy of step 4.
TEST_F(StateRetentionTest, AStateIsNeededWhileThoseMayReturnWhoCanContinue) {
  durable.set_phase(pb::Durable::WAITING);
  pb::Report r = report("a", 0);
  merge_text("has_inventory: true holdings { generation: 1 step: 4 }", &r);
  hear(r);
  roster.drain("a");
  const StateRetention retention(small_job().elastic(), true);
  ClusterView later = view_at(4, 3);
  later.now_ms = 60'000;
  EXPECT_FALSE(retention.needs_memory_of(later, policy, "a"));
  roster.expect_unheard(/*until_ms=*/60'001);
  EXPECT_TRUE(retention.needs_memory_of(later, policy, "a"));
}

TEST_F(StateRetentionTest, LostStepsAreNotUnsaved) {
  durable.set_phase(pb::Durable::WAITING);
  pb::Report r = report("a", 0);
  merge_text("has_inventory: true holdings { step: 92 } holdings { step: 93 }",
             &r);
  hear(r);
  const StateRetention retention(small_job().elastic(), true);
  EXPECT_FALSE(retention.must_save_before_stop(view_at(190, 93), policy));
  EXPECT_FALSE(retention.needs_memory_of(view_at(190, 93), policy, "a"));
  EXPECT_EQ(retention.only_in_memory(view_at(190, 93)), "");
  EXPECT_TRUE(retention.must_save_before_stop(view_at(190, 92), policy));
  EXPECT_TRUE(retention.needs_memory_of(view_at(190, 92), policy, "a"));
  EXPECT_EQ(retention.only_in_memory(view_at(190, 92)),
            "step 93 is in no checkpoint, but in the memory of a");
}

TEST_F(StateRetentionTest, AStopSavesStepsThatAreInMemoryOnly) {
  pb::Report r = report("a", 0);
  r.add_holdings()->set_step(9);
  hear(r);
  const StateRetention retention(small_job().elastic(), true);
  EXPECT_TRUE(retention.must_save_before_stop(view_at(9, 5), policy));
  EXPECT_FALSE(retention.must_save_before_stop(view_at(9, 9), policy));
}

// The daemon that holds the last steps is restarted, or the coordinator.
TEST_F(StateRetentionTest, AStopWaitsForThoseWhoHoldStepsThatAreNotSaved) {
  durable = running({"a"}, pb::Durable::WAITING);
  const StateRetention retention(small_job().elastic(), true);
  ClusterView v = view_at(9, 5);
  const auto must_save = [&] {
    return retention.must_save_before_stop(v, policy);
  };
  v.now_ms = small_job().elastic().rejoin_wait_ms() - 1;
  EXPECT_FALSE(must_save());
  EXPECT_TRUE(retention.awaits_unsaved_steps(v));
  v.now_ms += 1;
  EXPECT_FALSE(retention.awaits_unsaved_steps(v)) << "it does not return";
  pb::Report r = report("a", 0);
  hear(r);
  EXPECT_TRUE(must_save()) << "it has not said what it holds";
  merge_text("has_inventory: true holdings { step: 9 }", &r);
  hear(r);
  EXPECT_TRUE(must_save());
  r.mutable_holdings(0)->set_step(5);
  hear(r);
  v.now_ms = 0;
  EXPECT_FALSE(must_save());
  EXPECT_FALSE(retention.awaits_unsaved_steps(v)) << "it has lost them";
}

}  // namespace
}  // namespace remesh::core
