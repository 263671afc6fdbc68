// Which steps are finished, by reports, checkpoints and restored states.
#include "coordinator/core/step_ledger.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "coordinator/core/state_choice.h"
#include "tests/testing/allocations.h"
#include "tests/testing/text_message.h"

namespace remesh::core {
namespace {

pb::StepMetrics step(int64_t generation, int64_t number) {
  pb::StepMetrics m;
  m.set_generation(generation);
  m.set_step(number);
  return m;
}

std::vector<int64_t> numbers(const StepLedger::Entries& entries) {
  std::vector<int64_t> out;
  for (const auto& e : entries)
    out.push_back(e.metrics ? e.metrics->step() : 0);
  return out;
}

using Numbers = std::vector<int64_t>;

TEST(StepLedger, FinishesReportedStepsUpToTheCommittedOneOnce) {
  StepLedger ledger;
  for (const int64_t n : {1, 2, 3}) ledger.report(step(1, n));
  EXPECT_EQ(numbers(ledger.advance(1, 2)), (Numbers{1, 2}));
  EXPECT_EQ(numbers(ledger.advance(1, 2)), Numbers{});
  ledger.report(step(1, 2));
  EXPECT_EQ(numbers(ledger.advance(1, 3)), Numbers{3});
  EXPECT_EQ(ledger.last_finished(), 3);
  EXPECT_EQ(ledger.last_metrics()->step(), 3);
}

TEST(StepLedger, KnowsTheNewestStepsOfTheLogAndSince) {
  // Every third step makes its update.
  std::vector<pb::StepMetrics> log;
  for (int64_t n = 1; n <= 600; ++n) {
    log.push_back(step(1, n));
    if (n % 3 != 0) log.back().set_skipped(true);
  }
  StepLedger ledger(600, log, {{1, 1}});
  ledger.report(step(1, 601));
  ASSERT_EQ(ledger.advance(1, 601).size(), 1U);
  const auto recent = ledger.before(1, 601, {});
  EXPECT_EQ(recent.back().step(), 601);
  for (size_t i = 1; i < recent.size(); ++i)
    ASSERT_EQ(recent[i].step(), recent[i - 1].step() + 1);
  EXPECT_EQ(std::count_if(recent.begin(), recent.end(),
                          [](const auto& m) { return !m.skipped(); }),
            StepLedger::kRecentUpdates);
}

// A job went back to the checkpoint of step 200, lost 150 steps and made some
// of them once more.
TEST(StepLedger, KnowsTheStepsBeforeAnOlderState) {
  std::vector<pb::StepMetrics> log;
  for (int64_t n = 1; n <= 350; ++n) log.push_back(step(1, n));
  CheckpointInfo saved{.step = 200};
  for (int64_t n = 1; n <= 200; ++n) saved.recent.push_back(step(1, n));
  StepLedger ledger(350, log, {{1, 1}});
  const auto first = ledger.before(1, 200, {saved});
  ASSERT_EQ(first.size(), size_t{StepLedger::kRecentUpdates});
  EXPECT_EQ(first.back().step(), 200);
  for (int64_t n = 201; n <= 300; ++n) ledger.report(step(2, n));
  const auto second = ledger.before(2, 260, {saved});
  ASSERT_EQ(second.size(), size_t{StepLedger::kRecentUpdates});
  for (size_t i = 0; i < second.size(); ++i) {
    const int64_t n = 260 - StepLedger::kRecentUpdates + 1 + int64_t(i);
    EXPECT_EQ(second[i].step(), n);
    EXPECT_EQ(second[i].generation(), n <= 200 ? 1 : 2);
  }
  EXPECT_EQ(ledger.last_finished(), 350);
  // Reported, not finished, and restored from memory.
  for (const int64_t n : {351, 352, 354}) ledger.report(step(2, n));
  EXPECT_EQ(ledger.before(2, 352, {saved}).back().step(), 352);
  EXPECT_EQ(ledger.before(2, 354, {saved}).back().step(), 352) << "353 is lost";
  EXPECT_EQ(ledger.before(1, 352, {saved}).back().step(), 350);
}

// After a long time without a coordinator workers have only the newest ones.
TEST(StepLedger, StepsFarAheadAreFinishedBehindAGap) {
  StepLedger ledger(10, {}, {{1, 1}});
  const int64_t far = 1'000'000;
  ledger.report(step(1, far));
  const auto entries = ledger.advance(1, far);
  ASSERT_EQ(entries.size(), 1U);
  EXPECT_EQ(entries[0].gap_first, 11);
  EXPECT_EQ(ledger.last_finished(), far);
}

// Whoever reports steps or generations without end fills no memory, and costs
// nobody else's steps.
TEST(StepLedger, StepsThatAreNotFinishedAreBounded) {
  StepLedger ledger;
  constexpr int64_t kAhead = 1 << 17, kGenerations = 64;
  for (int64_t n = 1; n <= kAhead + 2; ++n) ledger.report(step(1, n));
  EXPECT_EQ(ledger.last_known(1), kAhead);
  StepLedger many;
  for (int64_t g = 1; g <= kGenerations; ++g) many.report(step(g, 1));
  EXPECT_EQ(many.last_known(1), 1);
  many.report(step(kGenerations + 1, 1));
  EXPECT_EQ(many.last_known(1), 0);
  EXPECT_EQ(many.last_known(2), 1);
  EXPECT_EQ(many.last_known(kGenerations + 1), 1);
  StepLedger full;
  for (int64_t g = 1; g <= 5; ++g)
    for (int64_t n = 1; n <= kAhead; ++n) full.report(step(g, n));
  EXPECT_EQ(full.last_known(1), 0);
  EXPECT_EQ(full.last_known(2), kAhead);
  EXPECT_EQ(full.last_known(5), kAhead);
}

// Each rank reports each step: most reports arrive once it is finished.
TEST(StepLedger, ACalmJobTakesNoMoreMemoryWithTime) {
  StepLedger ledger;
  int64_t n = 1;
  const auto run_to = [&](int64_t last) {
    for (; n <= last; ++n) {
      ledger.report(step(1, n));
      ASSERT_EQ(ledger.advance(1, n).size(), 1U);
      ledger.report(step(1, n));
    }
  };
  run_to(2 * StepLedger::kRecentUpdates);
  reset_allocations();
  run_to(10 * StepLedger::kRecentUpdates);
  EXPECT_LT(most_allocated(), 10'000U);
}

// The coordinator was down until a generation had made steps, and does not have
// those before them in its record.
TEST(StepLedger, AGenerationHasTheStepsBeforeTheStateThatItRestored) {
  const auto a = text_message<pb::Assignment>(
      "generation: 3 "
      "source { kind: MEMORY step: 5 states { generation: 1 } }");
  pb::Branches branches;
  StepLedger(2, {}, {}).continue_from_source(a, &branches);
  StepLedger ledger(2, {}, {}, branches);
  for (int64_t n = 3; n <= 6; ++n) ledger.report(step(1, n));
  for (int64_t n = 6; n <= 7; ++n) ledger.report(step(3, n));
  EXPECT_EQ(ledger.last_known(3), 7);
  EXPECT_FALSE(ledger.origin(3, 4));
  EXPECT_FALSE(ledger.origin(1, 5));
  const auto from = ledger.origin(3, 5);
  ASSERT_TRUE(from);
  EXPECT_EQ(from->generation, 1);
  EXPECT_EQ(from->step, 5);
  std::vector<int64_t> generations;
  for (const auto& e : ledger.restore(3, 7)) {
    EXPECT_EQ(e.gap_first, 0);
    generations.push_back(e.metrics->generation());
  }
  EXPECT_EQ(generations, (std::vector<int64_t>{1, 1, 1, 3, 3}));
  EXPECT_FALSE(ledger.origin(3, 7));
  ledger.continue_from_source(a, &branches);
  EXPECT_EQ(branches.origins_size(), 0);
}

TEST(StepLedger, AWorkerKnowsWhereAGenerationContinuedIfTheJournalDoesNot) {
  StepLedger ledger(2, {}, {});
  for (int64_t n = 3; n <= 5; ++n) ledger.report(step(1, n));
  ledger.report(step(3, 6));
  pb::Branches::Origin origin;
  merge_text("generation: 3 from: 1 step: 5", &origin);
  ledger.report(origin);
  EXPECT_EQ(ledger.last_known(3), 6);
  // The journal of a later generation has it, and is believed.
  const auto next = text_message<pb::Assignment>("generation: 4");
  pb::Branches branches;
  ledger.continue_from_source(next, &branches);
  ASSERT_EQ(branches.origins_size(), 1);
  EXPECT_EQ(branches.origins(0).from(), 1);
  origin.set_from(2);
  ledger.report(origin);
  EXPECT_EQ(ledger.last_known(3), 6);
  for (int64_t g = 4; g < 200; ++g) {
    origin.set_generation(g);
    ledger.report(origin);
  }
  ledger.continue_from_source(next, &branches);
  EXPECT_EQ(branches.origins_size(), 64) << "the newest ones";
  EXPECT_EQ(branches.origins(63).generation(), 199);
}

TEST(StepLedger, StepsOfAnotherGenerationAreNotFinishedByThisOne) {
  StepLedger ledger;
  ledger.report(step(1, 1));
  EXPECT_TRUE(ledger.advance(2, 9).empty());
  EXPECT_EQ(ledger.last_finished(), 0);
}

TEST(StepLedger, AMissingReportIsAGapBeforeTheNextStep) {
  StepLedger ledger(4, {}, {});
  ledger.report(step(1, 7));
  const auto entries = ledger.advance(1, 7);
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries[0].gap_first, 5);
  EXPECT_EQ(entries[0].gap_last, 6);
  EXPECT_EQ(entries[0].metrics->step(), 7);
}

TEST(StepLedger, ARestoredStateFinishesItsStepsFromReportsAndCheckpoints) {
  StepLedger ledger(2, {}, {{1, 1}});
  ledger.report(step(1, 3));
  ledger.prove({{.step = 5,
                 .generation = 1,
                 .path = "step-5",
                 .recent = {step(1, 4), step(1, 5)}}});
  EXPECT_EQ(ledger.last_known(1), 5);
  EXPECT_EQ(numbers(ledger.restore(1, 5)), (Numbers{3, 4, 5}));
  EXPECT_EQ(ledger.last_finished(), 5);
}

TEST(StepLedger, ARestoredStepWithoutMetricsIsAGap) {
  StepLedger ledger(2, {}, {});
  ledger.report(step(3, 3));
  const auto entries = ledger.restore(3, 6);
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[1].gap_first, 4);
  EXPECT_EQ(entries[1].gap_last, 6);
  EXPECT_FALSE(entries[1].metrics);
  EXPECT_EQ(ledger.last_finished(), 6);
}

TEST(StepLedger, AnAbandonedBranchProvesNothing) {
  // Generation 1 made steps to 5; generation 2 continued from step 2.
  StepLedger ledger(3, {}, {{1, 1}, {2, 3}});
  ledger.prove({{.step = 5,
                 .generation = 1,
                 .path = "step-5",
                 .recent = {step(1, 4), step(1, 5)}}});
  EXPECT_EQ(ledger.last_known(2), 3);
  EXPECT_EQ(abandoned_by(ledger.first_steps(), 1, 4), 2);
  EXPECT_EQ(abandoned_by(ledger.first_steps(), 1, 2), 0);
  EXPECT_EQ(abandoned_by(ledger.first_steps(), 2, 9), 0);
}

TEST(StepLedger, ABranchBetweenARestoredStepAndItsGenerationIsAbandoned) {
  // Generations 2 and 3 continued from step 2 of generation 1 and recorded
  // nothing. Then step 3 of generation 1 was restored for generation 4.
  pb::Branches branches;
  StepLedger ledger(2, {}, {{1, 1}});
  ledger.report(step(1, 3));
  EXPECT_TRUE(ledger.abandon_between(1, 3, 4, &branches));
  EXPECT_EQ(numbers(ledger.restore(1, 3)), (Numbers{3}));
  const auto by = [&](int64_t g, int64_t s) {
    return abandoned_by(ledger.first_steps(), g, s);
  };
  EXPECT_EQ(by(1, 3), 0);
  EXPECT_EQ(by(2, 3), 4);
  EXPECT_EQ(by(3, 2), 0) << "the restored step of both";
  EXPECT_EQ(by(3, 4), 4);
  EXPECT_EQ(by(4, 4), 0);
  // What generation 1 made after the restored step is abandoned as usual, once
  // generation 4 has made a step of its own.
  EXPECT_EQ(by(1, 4), 0);
  ledger.report(step(4, 4));
  EXPECT_EQ(ledger.advance(4, 4).size(), 1u);
  EXPECT_EQ(by(1, 4), 4);
}

}  // namespace
}  // namespace remesh::core
