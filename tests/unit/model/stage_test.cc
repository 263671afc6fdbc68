// Properties of the Llama stage that hold for any weights: recomputation,
// split backward, chunks, slots, shared weight memory and accumulation change
// no bit.
#include "worker/model/stage.h"

#include <algorithm>
#include <limits>

#include "tests/testing/expect.h"
#include "tests/testing/llama.h"
#include "tests/unit/model/model_fixture.h"
#include "worker/model/llama/rope.h"

namespace remesh::model {
namespace {

#ifdef __SANITIZE_THREAD__
constexpr int kThreads = 1;  // OpenMP's barriers are invisible to it
#else
constexpr int kThreads = 2;
#endif

constexpr int64_t kB = 2, kT = 70;
constexpr auto kNone = Recompute::kNone;
constexpr auto kSelective = Recompute::kSelective;
constexpr auto kFull = Recompute::kFull;

geometry::ModelConfig small_config(bool tied) {
  constexpr int64_t kVocab = 4200;  // two pieces of the head
  return geometry::llama(24, 4, 4, 2, 52, kVocab, tied);
}

Model small_model(bool tied) {
  return {small_config(tied), 3 * kB * kT + 1, 1};
}

StageOptions whole(Dtype d, std::vector<Recompute> recompute = {}) {
  return {.dtype = d,
          .recompute = std::move(recompute),
          .max_batch = kB,
          .max_seq = kT};
}

class StageTest : public testing::TestWithParam<Dtype> {
 protected:
  void SetUp() override {
    if (GetParam() == Dtype::kBf16 && !cpu_->supports_bf16())
      GTEST_SKIP() << "needs bf16";
  }
  void expect_same(const Passed& a, const Passed& b) {
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(a.grads, b.grads);
  }
  // A tied embedding that two stages have is summed in another order.
  void expect_same_but_tied(const Passed& a, const Passed& b, const Model& m) {
    const auto n = static_cast<size_t>(
        m.table.config().tie_embeddings ? m.table[0].numel() : 0);
    const auto cut = [&](const Passed& p, bool tied) {
      return std::vector<float>(p.grads.begin() + (tied ? 0 : n),
                                tied ? p.grads.begin() + n : p.grads.end());
    };
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(cut(a, false), cut(b, false));
    EXPECT_LT(relative_l2(cut(a, true), cut(b, true)), 1e-6);
  }
  // One thread: two of them wait long for each other on a busy machine.
  std::unique_ptr<kernels::Backend> cpu_ = kernels::make_cpu_backend(1);
};

TEST_P(StageTest, AgreesWithTheReferenceBackend) {
  const Model m = small_model(false);
  const auto reference = kernels::make_reference_backend();
  const auto cpu = kernels::make_cpu_backend(kThreads);
  auto options = whole(GetParam());
  options.max_seq = 20;  // the reference is slow
  const Passed a = run_pipeline(m, {}, options, *cpu);
  const Passed b = run_pipeline(m, {}, options, *reference);
  if (GetParam() == Dtype::kFp32) {
    EXPECT_NEAR(a.loss[0] / b.loss[0], 1.0, 1e-5);
    EXPECT_LT(relative_l2(a.grads, b.grads), 1e-5);
    return;
  }
  // The two round at different points, which these large weights amplify; but
  // neither may lose much more than the other.
  auto exact = whole(Dtype::kFp32);
  exact.max_seq = 20;
  const Passed c = run_pipeline(m, {}, exact, *reference);
  EXPECT_NEAR(a.loss[0] / c.loss[0], 1.0, 1e-3);
  EXPECT_LT(relative_l2(a.grads, c.grads), 1.5 * relative_l2(b.grads, c.grads));
}

TEST_P(StageTest, RecomputationGivesTheSameBitsInLessMemory) {
  for (const bool tied : {false, true}) {
    const Model m = small_model(tied);
    const Passed expected = run_pipeline(m, {}, whole(GetParam()), *cpu_);
    uint64_t activations = UINT64_MAX;
    for (const std::vector<Recompute>& r : std::vector<std::vector<Recompute>>{
             {kNone, kNone, kNone, kNone},
             {kFull, kSelective, kNone, kNone},
             {kSelective, kSelective, kSelective, kSelective},
             {kSelective, kFull, kFull, kFull},
             {kFull, kFull, kFull, kFull}}) {
      expect_same(run_pipeline(m, {}, whole(GetParam(), r), *cpu_), expected);
      const RankModel rank(m, {}, {}, 1, whole(GetParam(), r), *cpu_);
      const uint64_t bytes = rank.stages[0]->memory().activations;
      EXPECT_LT(bytes, activations);
      activations = bytes;
    }
  }
}

TEST_P(StageTest, ChunksGiveTheBitsOfOneStage) {
  for (const bool tied : {false, true}) {
    const Model m = small_model(tied);
    const Passed expected =
        run_pipeline(m, {.microbatches = 2}, whole(GetParam()), *cpu_);
    for (const Pipeline& p :
         {Pipeline{2, 1, 2}, {3, 1, 2}, {4, 1, 2}, {2, 2, 2}})
      expect_same_but_tied(run_pipeline(m, p, whole(GetParam()), *cpu_),
                           expected, m);
  }
}

TEST_P(StageTest, SplitBackwardGivesTheSameBits) {
  for (const bool tied : {false, true}) {
    const Model m = small_model(tied);
    const Passed expected =
        run_pipeline(m, {.microbatches = 3}, whole(GetParam()), *cpu_);
    for (const std::vector<Recompute>& r : std::vector<std::vector<Recompute>>{
             {},
             {kFull, kFull, kFull, kFull},
             {kSelective, kFull, kNone, kFull}}) {
      StageOptions o = whole(GetParam(), r);
      o.split_backward = true;
      expect_same(run_pipeline(m, {.microbatches = 3}, o, *cpu_), expected);
      expect_same_but_tied(run_pipeline(m, {2, 2, 3}, o, *cpu_), expected, m);
    }
  }
}

TEST_P(StageTest, SlotsInFlightDoNotDisturbEachOther) {
  const Model m = small_model(false);
  for (const std::vector<Recompute>& r :
       {std::vector<Recompute>(), std::vector(4, kFull)})
    for (const bool split : {false, true}) {
      StageOptions options = whole(GetParam(), r);
      options.split_backward = split;
      RankModel serial(m, {}, {}, 1, options, *cpu_);
      double loss[2];
      for (const int i : {0, 1}) {
        Stage& s = *serial.stages[0];
        loss[i] = s.forward(0, m.batch(i, kB, kT), nullptr, serial.hooks);
        s.backward(0, 0.01, nullptr, serial.hooks);
        if (split) s.backward_weight(0, serial.hooks);
      }
      options.num_slots = 2;
      RankModel rank(m, {}, {}, 1, options, *cpu_);
      Stage& s = *rank.stages[0];
      // Evaluation between the passes leaves the slots alone.
      const auto evaluate = [&] {
        EXPECT_EQ(s.evaluate(m.batch(1, kB, kT), nullptr, rank.hooks), loss[1]);
      };
      for (const int i : {0, 1})
        EXPECT_EQ(s.forward(i, m.batch(i, kB, kT), nullptr, rank.hooks),
                  loss[i]);
      evaluate();
      for (const int i : {0, 1}) s.backward(i, 0.01, nullptr, rank.hooks);
      evaluate();
      if (split)
        for (const int i : {0, 1}) s.backward_weight(i, rank.hooks);
      EXPECT_EQ(rank.grads, serial.grads);
    }
}

TEST_P(StageTest, EvaluatesThroughAPipelineAndTellsTheLogits) {
  const Model m = small_model(true);
  const MicroBatch mb = m.batch(0, kB, kT);
  RankModel one(m, {}, {}, 1, whole(GetParam(), {kNone, kFull, kNone, kNone}),
                *cpu_);
  const double loss = one.stages[0]->forward(0, mb, nullptr, one.hooks);
  std::vector<float> logits[3];
  for (auto& l : logits) l.resize(kT * 4200);
  one.stages[0]->logits(0, kT, logits[0]);
  RankModel first(m, {.pp = 2}, {.pp = 0}, 1, whole(GetParam()), *cpu_);
  RankModel last(m, {.pp = 2}, {.pp = 1}, 1, whole(GetParam()), *cpu_);
  EXPECT_EQ(first.stages[0]->evaluate(mb, nullptr, first.hooks), 0.0);
  const float* x = first.stages[0]->evaluated();
  EXPECT_EQ(last.stages[0]->evaluate(mb, x, last.hooks), loss);
  last.stages[0]->logits(0, kT, logits[1]);
  EXPECT_EQ(logits[1], logits[0]);
  // After another forward, its logits.
  last.stages[0]->forward(0, m.batch(1, kB, kT), x, last.hooks);
  last.stages[0]->logits(0, kT, logits[2]);
  EXPECT_EQ(logits[2], logits[0]);  // the same input, other targets
}

TEST_P(StageTest, DocumentsOfASequenceAreComputedAsIfAlone) {
  const Model m = small_model(false);
  MicroBatch packed = m.batch(0, kB, kT);
  const std::vector<int64_t> starts = {1, 30, 31, kT + 64};
  packed.document_starts = starts;
  const auto documents = documents_of(packed);
  ASSERT_EQ(documents.size(), starts.size() + kB);
  for (const auto& recompute :
       {std::vector<Recompute>(), std::vector(4, kFull)}) {
    RankModel together(m, {}, {}, 1, whole(GetParam(), recompute), *cpu_);
    RankModel alone(m, {}, {}, 1, whole(GetParam()), *cpu_);
    Stage& s = *together.stages[0];
    const double loss = s.forward(0, packed, nullptr, together.hooks);
    s.backward(0, 0.01, nullptr, together.hooks);
    double sum = 0;
    for (const kernels::Document& d : documents) {
      sum +=
          alone.stages[0]->forward(0,
                                   {packed.tokens_BT + d.first,
                                    packed.targets_BT + d.first, 1, d.tokens},
                                   nullptr, alone.hooks);
      alone.stages[0]->backward(0, 0.01, nullptr, alone.hooks);
    }
    const bool bf16 = GetParam() == Dtype::kBf16;
    EXPECT_NEAR(loss / sum, 1, bf16 ? 1e-3 : 1e-6);
    EXPECT_LT(relative_l2(together.grads, alone.grads), bf16 ? 3e-2 : 1e-5);
    EXPECT_EQ(s.evaluate(packed, nullptr, together.hooks), loss);
  }
}

TEST_P(StageTest, ADocumentDoesNotSeeTheOneBefore) {
  const Model m = small_model(false);
  const std::vector<int64_t> starts = {40};
  RankModel rank(m, {}, {}, 1, whole(GetParam()), *cpu_);
  Stage& s = *rank.stages[0];
  std::vector<float> logits[3];
  for (int i = 0; i < 3; ++i) {
    std::vector<int32_t> tokens(m.tokens.begin(), m.tokens.begin() + kT);
    // Another token before the document, or in it.
    if (i > 0) tokens[i == 1 ? 39 : 40] ^= 1;
    s.evaluate({tokens.data(), tokens.data(), 1, kT, starts}, nullptr,
               rank.hooks);
    logits[i].resize(kT * 4200);
    s.logits(0, kT, logits[i]);
    logits[i].erase(logits[i].begin(), logits[i].begin() + 41 * 4200);
  }
  EXPECT_EQ(logits[0], logits[1]);
  EXPECT_NE(logits[0], logits[2]);
}

TEST_P(StageTest, SameRunGivesTheSameBits) {
  const Model m = small_model(false);
  Passed runs[2];
  for (Passed& r : runs) {
    const auto backend = kernels::make_cpu_backend(kThreads);
    auto options = whole(GetParam());
    options.max_seq = 20;
    r = run_pipeline(m, {.microbatches = 2}, options, *backend);
  }
  expect_same(runs[0], runs[1]);
}

TEST_P(StageTest, ShorterMicrobatchFitsALargerStage) {
  const Model m = small_model(false);
  StageOptions large = whole(GetParam());
  large.max_batch = 3;
  large.max_seq = 90;
  RankModel a(m, {}, {}, 1, large, *cpu_);
  RankModel b(m, {}, {}, 1, whole(GetParam()), *cpu_);
  double loss[2];
  int i = 0;
  for (RankModel* r : {&a, &b}) {
    loss[i++] = r->stages[0]->forward(0, m.batch(0, kB, kT), nullptr, r->hooks);
    r->stages[0]->backward(0, 0.01, nullptr, r->hooks);
  }
  EXPECT_EQ(loss[0], loss[1]);
  EXPECT_EQ(a.grads, b.grads);
}

// Loads units when they are needed, into memory that is poisoned as soon as
// they are released, and checks the contract of UnitHooks.
class StrictHooks final : public UnitHooks {
 public:
  StrictHooks(const Model& m, const geometry::ShardTable& shard)
      : shard_(shard), weights_(shard_of(m.weights, shard)) {
    copies_.resize(shard.units().size());
    grads_.resize(weights_.size());
    seen_.resize(shard.units().size());
  }
  void use(Stage& stage) { stage_ = &stage; }
  void need(int u) override {
    EXPECT_TRUE(live_.insert(u).second) << "needed twice";
    const geometry::Unit& unit = at(u);
    auto& copy = copies_[static_cast<size_t>(u)];
    copy.assign(weights_.begin() + unit.begin, weights_.begin() + unit.end);
    stage_->load_unit(u, copy);
    ++needed_;
  }
  void release(int u) override {
    EXPECT_EQ(live_.erase(u), 1U);
    auto& copy = copies_[static_cast<size_t>(u)];
    std::fill(copy.begin(), copy.end(),
              std::numeric_limits<float>::quiet_NaN());
  }
  float* grads(int u) override {
    EXPECT_TRUE(seen_[static_cast<size_t>(u)].empty()) << "after ready";
    return grads_.data() + at(u).begin;
  }
  void ready(int u) override {
    EXPECT_TRUE(seen_[static_cast<size_t>(u)].empty()) << "ready twice";
    seen_[static_cast<size_t>(u)] = part(u);
    order_.push_back(u);
  }
  void expect_all_ready() {
    for (size_t u = 0; u < seen_.size(); ++u)
      EXPECT_EQ(seen_[u], part(static_cast<int>(u))) << "unit " << u;
    EXPECT_TRUE(live_.empty());
  }
  const std::vector<float>& gradient() const { return grads_; }
  const std::vector<int>& order() const { return order_; }
  int needed() const { return needed_; }

 private:
  const geometry::Unit& at(int u) const {
    return shard_.units()[static_cast<size_t>(u)];
  }
  std::vector<float> part(int u) const {
    return {grads_.begin() + at(u).begin, grads_.begin() + at(u).end};
  }

  const geometry::ShardTable& shard_;
  std::vector<float> weights_, grads_;
  Stage* stage_ = nullptr;
  std::vector<std::vector<float>> copies_, seen_;
  std::set<int> live_;
  std::vector<int> order_;
  int needed_ = 0;
};

TEST_P(StageTest, UsesWeightsBetweenNeedAndReleaseAlone) {
  for (const bool tied : {false, true})
    for (const bool split : {false, true})
      for (const int buffers : {0, 2, 3}) {
        const Model m = small_model(tied);
        StageOptions o = whole(GetParam(), {kNone, kFull, kSelective, kFull});
        o.split_backward = split;
        const Passed expected = run_pipeline(m, {}, o, *cpu_);
        o.block_buffers = buffers;
        const auto shard = make_shard(m.table);
        StrictHooks hooks(m, shard);
        ASSERT_OK_AND(const auto stage, Stage::create(shard, o, *cpu_));
        hooks.use(*stage);
        EXPECT_EQ(stage->forward(0, m.batch(0, kB, kT), nullptr, hooks),
                  expected.loss[0]);
        stage->backward(0, 0.01, nullptr, hooks);
        EXPECT_EQ(hooks.order().empty(), split);
        if (split) stage->backward_weight(0, hooks);
        hooks.expect_all_ready();
        EXPECT_EQ(hooks.order(), (std::vector<int>{5, 4, 3, 2, 1, 0}));
        EXPECT_EQ(hooks.gradient(), expected.grads);
        EXPECT_GE(hooks.needed(), 11);
      }
}

TEST_P(StageTest, SharedWeightMemoryIsSmaller) {
  const Model m = small_model(false);
  const auto shard = make_shard(m.table);
  StageOptions o = whole(GetParam());
  uint64_t bytes[2];
  int i = 0;
  for (const int buffers : {0, 2}) {
    o.block_buffers = buffers;
    bytes[i++] = (*Stage::create(shard, o, *cpu_))->memory().weights;
  }
  if (GetParam() == Dtype::kFp32) {  // read in place
    EXPECT_EQ(bytes[0], 0U);
  } else {
    EXPECT_LT(bytes[1], bytes[0]);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, StageTest,
                         testing::Values(Dtype::kFp32, Dtype::kBf16),
                         [](const auto& info) {
                           return std::string(kernels::dtype_name(info.param));
                         });

TEST(Stage, RefusesWhatDoesNotFit) {
  const Model m = small_model(false);
  const auto backend = kernels::make_cpu_backend(1);
  const auto shard = make_shard(m.table);
  const auto refused = [&](const geometry::ShardTable& s,
                           const StageOptions& o) {
    const auto made = Stage::create(s, o, *backend);
    EXPECT_EQ(made.status().code(), Code::kInvalidArgument);
    return made.status().message();
  };
  StageOptions o = whole(Dtype::kFp32);
  o.chunk = 1;
  EXPECT_HAS(refused(shard, o), "allowed: 0 to 0");
  o = whole(Dtype::kFp32);
  o.num_slots = 0;
  refused(shard, o);
  o = whole(Dtype::kFp32, {kNone});
  refused(shard, o);
  o = whole(Dtype::kFp32);
  o.block_buffers = 1;
  refused(shard, o);
  // A shard of a larger mesh without its groups.
  refused(make_shard(m.table, {.tp = 2}), whole(Dtype::kFp32));
}

TEST(Rope, Llama3ScalingKeepsFastAndStretchesSlowFrequencies) {
  geometry::ModelConfig c = small_config(false);
  c.dim = 512;
  c.rope_theta = 500000.0;
  const auto plain = rope_frequencies(c);
  c.rope_scaled = true;
  const auto scaled = rope_frequencies(c);
  EXPECT_EQ(scaled.front(), plain.front());
  EXPECT_EQ(scaled.back(), plain.back() / c.rope_scaling.factor);
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_LE(scaled[i], plain[i]);
    EXPECT_GE(scaled[i], plain[i] / c.rope_scaling.factor);
  }
}

}  // namespace
}  // namespace remesh::model
