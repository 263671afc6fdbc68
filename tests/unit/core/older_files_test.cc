// What the coordinator does where others know more than its files, or its files
// less than it has said.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>

#include "coordinator/core/admission.h"
#include "coordinator/core/coordinator.h"
#include "coordinator/core/durable.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

Options options() {
  return {.job = text_message<pb::Job>(
              "train { steps: 1000 global_batch_size: 4 local_batch_size: 1 }"),
          .epoch_floor = 100};
}

// The journal of generation 1, in which "a" is alone.
pb::Durable alone_in_generation_1() {
  pb::Durable d = running({"a"});
  d.set_epoch(7);
  return d;
}

// With the proof that these numbers were used.
MessageReceived report(uint64_t seq, uint64_t epoch, int64_t generation = 0) {
  pb::Report r = core::report("a", seq);
  r.set_state(pb::Report::IDLE);
  r.set_generation(generation);
  r.set_coordinator_epoch(epoch);
  r.set_proof(proof_of("", epoch, generation));
  return received(r);
}

// The journal refuses the first write if a younger coordinator has journaled
// its epoch. Otherwise the journal is older, and this one continues above it.
TEST(YoungerCoordinator, TheJournalIsCheckedBeforeItsEpochIsExceeded) {
  Coordinator core(options());
  (void)core.start(0);
  const auto written = all_of<Persist>(core.on(report(1, 200), 10));
  ASSERT_GE(written.size(), 2u);
  EXPECT_EQ(written[0].durable.epoch(), 100u);
  EXPECT_EQ(written[1].durable.epoch(), 201u);
  EXPECT_EQ(all_of<Persist>(core.on(report(2, 201), 20)).size(), 0u);
}

// Workers are no longer asked for their states, so nobody waits for them.
TEST(Restored, WithoutKeepStateNoStatesAreExpected) {
  Options o = options();
  o.restored = alone_in_generation_1();
  o.restored->set_state_job(5);
  o.restored->set_rescue(true);
  const pb::Durable kept = restore(o, /*keeps_state=*/true);
  EXPECT_EQ(kept.state_job(), 5U);
  EXPECT_TRUE(kept.rescue());
  const pb::Durable d = restore(o, /*keeps_state=*/false);
  EXPECT_EQ(d.state_job(), 0U);
  EXPECT_FALSE(d.rescue());
}

// Workers forget the metrics of a step when it is acknowledged.
TEST(MetricsAcked, CoverOnlySyncedSteps) {
  Options o = options();
  o.last_finished_step = 5;
  Coordinator core(std::move(o));
  (void)core.start(0);
  const auto told = all_of<SendDirective>(core.on(report(1, 0), 10));
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].directive.metrics_acked(), 0);
  (void)core.on(Tick{.synced_step = 4}, 50);
  const auto later = all_of<SendDirective>(core.on(Tick{}, 300));
  ASSERT_EQ(later.size(), 1u);
  EXPECT_EQ(later[0].directive.metrics_acked(), 4);
}

// Workers may have ended its ranks before the job waits for a mesh.
TEST(OlderJournal, MetricsOfAGenerationThatItDoesNotKnowCount) {
  pb::Durable d = alone_in_generation_1();
  d.mutable_assignment()->add_workers("a");
  d.set_generation(2);
  pb::Report r = core::report("b", 1);
  r.set_generation(2);
  r.add_metrics()->set_generation(2);
  EXPECT_EQ(metrics_that_count(r, /*keeps_state=*/true, d).size(), 0u)
      << "it proves no part in it";
  r.add_holdings()->set_generation(2);
  EXPECT_EQ(metrics_that_count(r, /*keeps_state=*/true, d).size(), 1u);
  d.mutable_assignment()->set_generation(2);
  EXPECT_EQ(metrics_that_count(r, /*keeps_state=*/true, d).size(), 0u)
      << "its plan is known";
}

// The plan that the journal has is not the one of the generation that the
// metrics log knows: nobody is taken for a participant of that.
TEST(OlderJournal, ItsPlanIsNotThatOfANewerGeneration) {
  Options o = options();
  o.restored = alone_in_generation_1();
  pb::StepMetrics& last = o.recent_metrics.emplace_back();
  last.set_generation(2);
  last.set_step(o.last_finished_step = 5);
  Coordinator core(std::move(o));
  const auto actions = core.start(0);
  EXPECT_EQ(core.durable().phase(), pb::Durable::WAITING);
  EXPECT_EQ(core.durable().generation(), 2);
  EXPECT_EQ(core.durable().participants_size(), 0);
  const auto events = all_of<EmitEvent>(actions);
  ASSERT_GE(events.size(), 2u);
  EXPECT_EQ(events[1].record.event(), "journal_behind");
}

// The job was resumed after the backup, and its ranks run: whoever is told that
// it has ended removes its states.
TEST(OlderJournal, AnEndBeforeTheNewestGenerationIsNotBelieved) {
  for (const auto phase :
       {pb::Durable::DONE, pb::Durable::STOPPED, pb::Durable::FAILED}) {
    Options o = options();
    pb::Durable& d =
        o.restored.emplace(text_message<pb::Durable>("epoch: 7 generation: 1"));
    d.set_phase(phase);
    d.mutable_stop()->set_asked(phase == pb::Durable::STOPPED);
    o.recorded_generation = 2;
    Coordinator core(o);
    const auto events = all_of<EmitEvent>(core.start(0));
    EXPECT_EQ(core.durable().phase(), pb::Durable::WAITING);
    EXPECT_EQ(core.durable().generation(), 2);
    EXPECT_FALSE(core.durable().stop().asked());
    ASSERT_GE(events.size(), 2u);
    EXPECT_EQ(events[1].record.event(), "journal_behind");
    (void)core.on(report(1, 0, 2), 10);
    EXPECT_EQ(core.durable().phase(), pb::Durable::WAITING);
    EXPECT_FALSE(core.ended());
    // That of the newest generation is.
    o.recorded_generation = 1;
    Coordinator ended(o);
    (void)ended.start(0);
    EXPECT_EQ(ended.durable().phase(), phase);
    EXPECT_TRUE(ended.ended());
  }
}

// A worker that is told to wait has ended its ranks before. The journal was put
// back, and the job continues with the next generation.
TEST(OlderJournal, AGenerationThatHasEndedDoesNotRun) {
  Options o = options();
  o.restored = alone_in_generation_1();
  Coordinator core(std::move(o));
  (void)core.start(0);
  (void)core.on(report(1, 0, 1), kReconnectSlackMs - 1);
  EXPECT_EQ(core.durable().phase(), pb::Durable::RUNNING);
  (void)core.on(report(2, 0, 1), kReconnectSlackMs + 1);
  EXPECT_EQ(core.durable().phase(), pb::Durable::ABORTING);
}

// The journal has the plan of generation 1, in which "a" is alone, and others
// have parts in generation 2.
TEST(OlderJournal, ItsPlanCompletesNoFenceOfANewerGeneration) {
  Options o = options();
  o.restored = alone_in_generation_1();
  Coordinator core(std::move(o));
  (void)core.start(0);
  auto f =
      text_message<pb::FenceIn>("worker: 'a' incarnation: 1 generation: 1");
  EXPECT_EQ(all_of<SendFence>(core.on(received(f), 5)).size(), 1u);
  (void)core.on(report(1, 0, 2), 10);
  ASSERT_EQ(core.durable().generation(), 2);
  f.set_generation(2);
  EXPECT_EQ(all_of<SendFence>(core.on(received(f), 20)).size(), 0u);
}

// The journal of generation 1, in which "a" takes part, is put back.
class RestoredJournal : public testing::Test {
 protected:
  RestoredJournal() {
    Options o = options();
    o.secret = "of this run";
    o.restored = alone_in_generation_1();
    core_.emplace(std::move(o));
    (void)core_->start(0);
  }
  // At that time, with that secret; "": without a proof. The generation then.
  int64_t hear(MessageReceived m, const std::string& secret, int64_t now_ms) {
    pb::Report* r = m.message.mutable_report();
    r->clear_proof();
    if (!secret.empty())
      r->set_proof(proof_of(secret, r->coordinator_epoch(), r->generation()));
    (void)core_->on(m, now_ms);
    return core_->durable().generation();
  }
  std::optional<Coordinator> core_;
};

TEST_F(RestoredJournal, OnlyAWorkerOfThisRunRaisesItsNumbers) {
  constexpr int64_t kLater = kReconnectSlackMs + 10;
  MessageReceived stranger = report(1, 300, 900'000);
  stranger.message.mutable_report()->set_worker("stranger");
  const std::string before = core_->durable().SerializeAsString();
  for (const char* secret : {"", "of another run"})
    for (const int64_t now : {int64_t{10}, kLater}) {
      EXPECT_EQ(hear(stranger, secret, now), 1);
      EXPECT_EQ(core_->durable().SerializeAsString(), before);
      EXPECT_TRUE(core_->roster().find("stranger") == nullptr);
    }
  MessageReceived old = report(2, 120, 0);  // an epoch alone
  EXPECT_EQ(hear(old, "", kLater), 1);
  EXPECT_LT(core_->durable().epoch(), 120u);
  EXPECT_EQ(hear(stranger, "of this run", kLater), 900'000);
  EXPECT_EQ(core_->durable().epoch(), 301u);
}

TEST_F(RestoredJournal, AParticipantMustProveTheNumbersAsWell) {
  EXPECT_EQ(hear(report(1, 0, 2), "", kReconnectSlackMs - 1), 1);
  EXPECT_EQ(hear(report(2, 0, 2), "of this run", kReconnectSlackMs - 1), 2);
}

// What a worker repeats is what it was told.
TEST(Proofs, EachDirectiveHasTheProofOfItsNumbers) {
  Options o = options();
  o.secret = "s";
  o.run_dir = "/run";
  Coordinator core(std::move(o));
  (void)core.start(0);
  const auto told = all_of<SendDirective>(core.on(report(1, 0), 10));
  ASSERT_EQ(told.size(), 1u);
  const pb::Directive& d = told[0].directive;
  EXPECT_EQ(d.run_dir(), "/run") << "where to look for the next coordinator";
  EXPECT_EQ(d.proof(), proof_of("s", d.epoch(), d.generation()));
  EXPECT_NE(d.proof(), proof_of("s", d.epoch(), d.generation() + 1));
  EXPECT_NE(d.proof(), proof_of("s", d.epoch() + 1, d.generation()));
  EXPECT_NE(d.proof(), proof_of("t", d.epoch(), d.generation()));
}

}  // namespace
}  // namespace remesh::core
