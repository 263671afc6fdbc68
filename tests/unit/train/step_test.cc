#include "worker/train/step.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>

#include "parallel/comm/local_comm.h"
#include "parallel/geometry/batch.h"
#include "proto/base/rng.h"
#include "worker/train/restore.h"
#include "worker/train/schedule.h"

namespace remesh::train {
namespace {

constexpr int64_t kSeqLen = 16;
constexpr int64_t kMicrobatches = 4;  // of two sequences
constexpr int64_t kEach = 2;

geometry::ModelConfig tiny_config() {
  return {.dim = 16,
          .n_layers = 2,
          .n_heads = 4,
          .n_kv_heads = 2,
          .hidden_dim = 40,
          .vocab_size = 37};
}

struct Trained {
  std::vector<double> loss, norm;
  std::vector<float> weights;
  Status status;
  int64_t step = 0;
};

struct Case {
  int dp = 1;
  int steps = 50;
  model::Dtype dtype = model::Dtype::kFp32;
  float poison = 0;  // added to one weight
};

// A text in which the next token follows from the one before, most times.
int32_t token(int64_t sequence, int64_t t) {
  const auto noise =
      random_u64(5, static_cast<uint64_t>(sequence), static_cast<uint64_t>(t));
  return static_cast<int32_t>(
      noise % 4 == 0 ? noise / 4 % 37
                     : static_cast<uint64_t>(sequence + 3 * t) % 37);
}

Trained train_rank(const Case& setup, comm::Comm& comm) {
  const auto table = geometry::ParamTable::llama(tiny_config());
  const auto backend = kernels::make_cpu_backend(1);
  const auto shard = geometry::ShardTable::make(table, {.dp = comm.size()},
                                                {.dp = comm.rank()}, {0, 2});
  auto stage = model::Stage::create(
      *shard, {.dtype = setup.dtype, .max_batch = kEach, .max_seq = kSeqLen},
      *backend);
  CHECK(stage.ok());
  TrainState state =
      TrainState::make(*backend, table.num_elements(), comm.size()).value();
  const auto zero =
      geometry::ZeroPlan::make(*shard, {}, comm.size(), comm.rank());
  fill_initial_weights(*shard, *zero, 7, 1, state.weights.span());
  exchange_parts(comm, *shard, *zero, state.weights.span());
  state.weights.data()[100] += setup.poison;
  (*stage)->load_weights(state.weights.span());
  Step step(*shard, **stage, *backend, comm, comm,
            {.weight_decay = 0.1, .max_norm = 1, .bucket_elements = 1500}, {});
  const auto mine = geometry::deal(kMicrobatches, comm.size(), comm.rank());
  Trained out;
  for (int s = 0; s < setup.steps; ++s) {
    const auto n = static_cast<size_t>(mine.size() * kEach * kSeqLen);
    std::vector<int32_t> tokens(n), targets(n);
    std::vector<model::MicroBatch> mbs;
    for (int64_t m = 0; m < mine.size(); ++m) {
      const int64_t at = m * kEach * kSeqLen;
      for (int64_t i = 0; i < kEach * kSeqLen; ++i) {
        const int64_t q =
            (s * kMicrobatches + mine.begin + m) * kEach + i / kSeqLen;
        tokens[static_cast<size_t>(at + i)] = token(q, i % kSeqLen);
        targets[static_cast<size_t>(at + i)] = token(q, i % kSeqLen + 1);
      }
      mbs.push_back({tokens.data() + at, targets.data() + at, kEach, kSeqLen});
    }
    const auto r =
        step.run({.lr = learning_rate(
                      {.lr = 1e-2, .warmup_steps = 5, .total_steps = 50}, s),
                  .microbatches = mbs,
                  .global_tokens = kMicrobatches * kEach * kSeqLen},
                 state);
    if (!r.ok()) {
      out.status = r.status();
      break;
    }
    out.loss.push_back(r->loss);
    out.norm.push_back(r->grad_norm);
  }
  out.step = state.step;
  out.weights.assign(state.weights.data(),
                     state.weights.data() + table.num_elements());
  return out;
}

std::vector<Trained> train(const Case& setup) {
  auto comms = comm::make_local_comms(setup.dp);
  std::vector<Trained> out(comms.size());
  std::vector<std::thread> ranks;
  for (size_t r = 0; r < comms.size(); ++r)
    ranks.emplace_back([&, r] { out[r] = train_rank(setup, *comms[r]); });
  for (std::thread& t : ranks) t.join();
  return out;
}

TEST(Step, LossDoesNotDependOnTheMesh) {
  const Trained one = train({.dp = 1})[0];
  ASSERT_TRUE(one.status.ok()) << one.status.to_string();
  ASSERT_EQ(one.loss.size(), 50U);
  EXPECT_LT(one.loss.back(), one.loss.front() - 0.5);  // it does learn
  for (const int dp : {2, 3, 5}) {  // the fifth rank has no microbatch
    const auto ranks = train({.dp = dp});
    for (const Trained& t : ranks) {
      EXPECT_EQ(t.loss, ranks[0].loss);  // every rank knows the same
      EXPECT_EQ(t.norm, ranks[0].norm);
      EXPECT_EQ(t.weights, ranks[0].weights);
    }
    for (size_t s = 0; s < one.loss.size(); ++s)
      EXPECT_NEAR(ranks[0].loss[s] / one.loss[s], 1, 1e-5)
          << "dp " << dp << " step " << s + 1;
  }
}

TEST(Step, OneMeshGivesTheSameBitsEachTime) {
  for (const model::Dtype dtype : {model::Dtype::kFp32, model::Dtype::kBf16}) {
    const Case setup{.dp = 3, .steps = 10, .dtype = dtype};
    const Trained a = train(setup)[0];
    const Trained b = train(setup)[0];
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(a.norm, b.norm);
    EXPECT_EQ(a.weights, b.weights);
  }
}

TEST(Step, NotFiniteStopsEveryRankWithTheStateUntouched) {
  const auto ranks =
      train({.dp = 2, .poison = std::numeric_limits<float>::quiet_NaN()});
  for (const Trained& t : ranks) {
    ASSERT_FALSE(t.status.ok());
    EXPECT_NE(t.status.message().find("step 1: loss"), std::string::npos)
        << t.status.message();
    EXPECT_EQ(t.step, 0);
    EXPECT_FALSE(std::isnan(t.weights[99]));
    EXPECT_FALSE(std::isnan(t.weights[101]));
  }
}

}  // namespace
}  // namespace remesh::train
