// On which tokens a job trains and validates, against a list that
// batch_order.py makes from the documentation alone.

#include "tests/testing/batch_order.h"

#include <atomic>
#include <chrono>
#include <fstream>
#include <thread>
#include <tuple>

#include "tests/testing/expect.h"
#include "tests/unit/train/trainer_fixture.h"
#include "worker/data/mix.h"
#include "worker/data/prepare.h"
#include "worker/train/batch_source.h"

namespace remesh::train {
namespace {

constexpr int64_t kSteps = 40;  // more than two passes over the data
constexpr int64_t kSeqLen = 32;
constexpr int64_t kBatch = 6;
constexpr int64_t kValidation = 5;

class BatchOrderTest : public TrainerTest {
 protected:
  std::vector<Sequence> list(uint64_t seed) {
    return list(seed, dir_ + "/data", kSteps * kBatch + kValidation);
  }
  std::vector<Sequence> list(uint64_t seed, const std::string& sets,
                             size_t lines) {
    auto out = documented_sequences({.sets = sets,
                                     .seed = seed,
                                     .seq_len = kSeqLen,
                                     .global_batch = kBatch,
                                     .steps = kSteps,
                                     .eval_sequences = kValidation});
    EXPECT_EQ(out.size(), lines);
    return out;
  }
};

void append(std::span<const model::MicroBatch> from,
            std::vector<Sequence>* to) {
  for (const model::MicroBatch& m : from)
    for (int64_t b = 0; b < m.B; ++b) {
      const int32_t* const tokens = m.tokens_BT + b * m.T;
      const int32_t* const targets = m.targets_BT + b * m.T;
      for (int64_t t = 1; t < m.T; ++t) EXPECT_EQ(targets[t - 1], tokens[t]);
      to->emplace_back(tokens, tokens + m.T);
      to->back().push_back(targets[m.T - 1]);
    }
}

TEST_F(BatchOrderTest, TheRanksTogetherReadTheList) {
  for (const uint64_t seed : {1ULL, 20261124ULL, ~0ULL}) {
    const std::vector<Sequence> want = list(seed);
    constexpr int64_t kMicrobatches = kBatch / 2;
    for (const geometry::Shares& shares : {geometry::Shares(1),
                                           geometry::Shares(2),
                                           geometry::Shares(5),
                                           geometry::Shares(7),
                                           {1, kMicrobatches - 1},
                                           {kMicrobatches, 0}}) {
      const auto dp = static_cast<int>(shares.size());
      const bool even = shares.back() == 0 && shares.front() == 0;
      std::vector<BatchSource> ranks;
      for (int r = 0; r < dp; ++r)
        ranks.push_back(
            BatchSource::make(data::Dataset::open(dir_ + "/data").value(),
                              {.seed = seed,
                               .seq_len = kSeqLen,
                               .global_batch = kBatch,
                               .local_batch = 2,
                               .eval_sequences = kValidation,
                               .shares = even ? geometry::Shares{} : shares,
                               .dp = dp,
                               .dp_index = r})
                .value());
      std::vector<Sequence> got;
      for (int64_t step = 0; step < kSteps; ++step)
        for (BatchSource& r : ranks) append(r.step(step).value(), &got);
      for (BatchSource& r : ranks) append(r.validation(0, 0).value(), &got);
      EXPECT_EQ(got, want) << "seed " << seed << ", dp" << dp;
    }
  }
}

// Data sets of different sizes, so that some are used up earlier, and one for
// validation only.
TEST_F(BatchOrderTest, AMixtureIsReadInItsOrder) {
  std::string sets;
  data::MixOptions mixed{.out_dir = dir_ + "/mix"};
  for (const auto& [name, words, weight] : {std::tuple{"a", 3000, "0.5"},
                                            {"v", 300, "0"},
                                            {"b", 500, "0.3"},
                                            {"c", 1500, "0.2"}}) {
    const std::string folder = dir_ + "/" + name;
    std::string text;
    for (int i = 0; i < words; ++i)
      text += name + std::to_string(i * i % 7919) + (i % 50 == 0 ? "\n" : " ");
    std::ofstream(folder + ".txt") << text;
    ASSERT_OK(data::prepare(
        {.inputs = {folder + ".txt"},
         .out_dir = folder,
         .val_fraction = std::string_view(weight) == "0" ? 1.0 : 0.2},
        *posix_file_system()));
    mixed.members.push_back(folder + "=" + weight);
    sets += (sets.empty() ? "" : ",") + mixed.members.back();
  }
  ASSERT_OK(data::mix(mixed, *posix_file_system()));
  const std::vector<Sequence> want =
      list(/*seed=*/3, sets, kSteps * kBatch + 4 * 2);
  for (const int dp : {1, 3}) {
    std::vector<BatchSource> ranks;
    for (int r = 0; r < dp; ++r)
      ranks.push_back(
          BatchSource::make(data::Dataset::open(mixed.out_dir).value(),
                            {.seed = 3,
                             .seq_len = kSeqLen,
                             .global_batch = kBatch,
                             .local_batch = 2,
                             .eval_sequences = kValidation,
                             .dp = dp,
                             .dp_index = r})
              .value());
    std::vector<Sequence> got;
    for (int64_t step = 0; step < kSteps; ++step)
      for (BatchSource& r : ranks) append(r.step(step).value(), &got);
    ASSERT_EQ(ranks[0].validated().size(), 4U);
    for (const size_t member : ranks[0].validated())
      for (BatchSource& r : ranks)
        append(r.validation(member, 0).value(), &got);
    EXPECT_EQ(got, want) << "dp" << dp;
  }
}

// However much text is held out, little of it is in memory at a time.
TEST_F(BatchOrderTest, AValidationIsReadInRoundsOnAllRanksAlike) {
  const auto make = [&](int64_t local_batch, int dp, int dp_index) {
    return BatchSource::make(data::Dataset::open(dir_ + "/data").value(),
                             {.seq_len = 8,
                              .global_batch = 64,
                              .local_batch = local_batch,
                              .eval_sequences = 1'000'000,
                              .dp = dp,
                              .dp_index = dp_index})
        .value();
  };
  BatchSource whole = make(64, 1, 0);
  ASSERT_EQ(whole.validation_rounds(0), 1);
  std::vector<Sequence> want;
  append(whole.validation(0, 0).value(), &want);
  for (const int dp : {1, 3, 5}) {
    std::vector<Sequence> got;
    for (int r = 0; r < dp; ++r) {
      BatchSource rank = make(1, dp, r);
      const int64_t rounds = rank.validation_rounds(0);
      EXPECT_EQ(rounds, make(1, dp, 0).validation_rounds(0));
      EXPECT_GT(rounds, 1);
      for (int64_t round = 0; round < rounds; ++round) {
        const auto part = rank.validation(0, round).value();
        EXPECT_LE(part.size(), 32U);
        append(part, &got);
      }
    }
    EXPECT_EQ(got, want) << "dp" << dp;
  }
}

TEST_F(BatchOrderTest, ASourceThatEndsDoesNotReadItsNextStep) {
  constexpr int64_t kMany = 1000;
  std::atomic<int64_t> begun = 0;
  {
    BatchSource source =
        BatchSource::make(
            data::Dataset::open(dir_ + "/data").value(),
            {.seq_len = kSeqLen,
             .global_batch = kMany,
             .local_batch = kMany,
             .before_sequence =
                 [&] {
                   if (begun++ >= kMany)  // of the next step
                     std::this_thread::sleep_for(std::chrono::milliseconds(20));
                 }})
            .value();
    ASSERT_OK(source.step(0));
  }
  EXPECT_GE(begun.load(), kMany);
  EXPECT_LT(begun.load(), 2 * kMany);
}

TEST_F(BatchOrderTest, DocumentsBeginAfterTheTokenThatEndsAText) {
  int64_t found = 0;
  for (const bool mask : {true, false}) {
    BatchSource source =
        BatchSource::make(data::Dataset::open(dir_ + "/data").value(),
                          {.seq_len = kSeqLen,
                           .global_batch = kBatch,
                           .local_batch = 2,
                           .eval_sequences = kValidation,
                           .document_mask = mask})
            .value();
    const auto check = [&](std::span<const model::MicroBatch> batches) {
      for (const model::MicroBatch& m : batches) {
        const std::vector<int64_t> got(m.document_starts.begin(),
                                       m.document_starts.end());
        EXPECT_EQ(got, mask ? document_starts(m, source.dataset().end_of_text())
                            : std::vector<int64_t>());
        found += static_cast<int64_t>(got.size());
      }
    };
    for (int64_t step = 0; step < kSteps; ++step)
      check(source.step(step).value());
    check(source.validation(0, 0).value());
  }
  EXPECT_GT(found, 0);
}

// With a learning rate of 0 the losses are those of the initial weights, and
// show which sequences a step was made of.
TEST_F(BatchOrderTest, ATrainerTrainsAndValidatesOnTheList) {
  const pb::RankSpec s =
      spec({"train.steps=" + std::to_string(kSteps), "optimizer.lr=0",
            "train.eval_every=1", "checkpoint.interval=0"});
  const Ended e = run(s);
  ASSERT_EQ(e.code, 0) << output();
  ASSERT_EQ(e.steps.size(), static_cast<size_t>(kSteps));

  const pb::Job& job = s.assignment().job();
  const std::vector<Sequence> sequences = list(job.train().seed());
  InitialLoss initial(job);
  const auto loss_of = [&](int64_t first, int64_t n) {
    return initial.of(std::span(sequences).subspan(static_cast<size_t>(first),
                                                   static_cast<size_t>(n)));
  };
  const double val_loss = loss_of(kSteps * kBatch, kValidation);
  double before = 0;
  for (int64_t i = 0; i < kSteps; ++i) {
    const auto& got = e.steps[static_cast<size_t>(i)];
    const double want = loss_of(i * kBatch, kBatch);
    EXPECT_NEAR(got.loss, want, 2e-6) << "step " << i + 1;
    EXPECT_GT(std::abs(want - before), 1e-5) << "cannot tell them apart";
    EXPECT_NEAR(got.val_loss, val_loss, 2e-6) << "step " << i + 1;
    before = want;
  }
}

TEST_F(BatchOrderTest, SetsThatOnlyValidateHaveTheirMeanLoss) {
  const std::string held_out = "the old ship\nwas calm and sailed on.\n";
  std::string text;
  for (int i = 0; i < 100; ++i) text += held_out;
  const auto add = [&](const std::string& name, double val_fraction) {
    std::ofstream(dir_ + "/" + name + ".txt") << name << text;
    return data::prepare({.inputs = {dir_ + "/" + name + ".txt"},
                          .out_dir = dir_ + "/" + name,
                          .val_fraction = val_fraction},
                         *posix_file_system())
        .status();
  };
  ASSERT_OK(add("train", 0));
  ASSERT_OK(add("x", 1));
  ASSERT_OK(add("yyyyyy", 1));
  ASSERT_OK(data::mix(
      {.members = {dir_ + "/train=1", dir_ + "/x=0", dir_ + "/yyyyyy=0"},
       .out_dir = dir_ + "/mix"},
      *posix_file_system()));
  const Ended e = run(spec({"train.steps=2", "train.eval_every=1",
                            "checkpoint.interval=0", "data.path=mix"}));
  ASSERT_EQ(e.code, 0) << output();
  ASSERT_EQ(e.steps.size(), 2U);
  for (const board::StepRecord& step : e.steps) {
    ASSERT_EQ(step.validated, 2);
    EXPECT_NE(step.val_losses[0], step.val_losses[1]);
    EXPECT_DOUBLE_EQ(step.val_loss,
                     (step.val_losses[0] + step.val_losses[1]) / 2);
  }
}

}  // namespace
}  // namespace remesh::train
