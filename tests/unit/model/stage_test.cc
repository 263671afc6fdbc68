// Properties of the Llama stage that hold for any weights: recomputation,
// stages, slots and accumulation change nothing.
#include "worker/model/stage.h"

#include <gtest/gtest.h>

#include <cmath>

#include "proto/base/rng.h"
#include "worker/kernels/backend.h"
#include "worker/model/rope.h"

namespace remesh::model {
namespace {

#ifdef __SANITIZE_THREAD__
constexpr int kThreads = 1;  // OpenMP's barriers are invisible to it
#else
constexpr int kThreads = 2;
#endif

constexpr int64_t kB = 2, kT = 70;

geometry::ModelConfig small_config(bool tied) {
  return {.dim = 24,
          .n_layers = 3,
          .n_heads = 4,
          .n_kv_heads = 2,
          .hidden_dim = 52,
          .vocab_size = 4200,  // two pieces of the head
          .tie_embeddings = tied};
}

struct Model {
  explicit Model(bool tied)
      : table(geometry::ParamTable::llama(small_config(tied))) {
    for (size_t i = 0; i < table.size(); ++i)
      for (int64_t e = 0; e < table[i].numel(); ++e)
        weights.push_back(5.0F * table.initial_value(1, i, e));
    for (int64_t i = 0; i < 2 * kB * kT + 1; ++i)
      tokens.push_back(static_cast<int32_t>(
          random_u64(1, 2, static_cast<uint64_t>(i)) % 4200));
  }
  MicroBatch batch(int64_t number) const {
    return {tokens.data() + number * kB * kT,
            tokens.data() + number * kB * kT + 1, kB, kT};
  }
  std::vector<float> zeros() const {
    return std::vector<float>(weights.size());
  }

  geometry::ParamTable table;
  std::vector<float> weights;
  std::vector<int32_t> tokens;
};

StageOptions whole(Dtype d, Recompute recompute = Recompute::kNone) {
  return {.num_layers = 3,
          .dtype = d,
          .keep_dtype = true,
          .recompute = recompute,
          .max_batch = kB,
          .max_seq = kT};
}

std::unique_ptr<Stage> make(const Model& m, const StageOptions& o,
                            kernels::Backend& b) {
  auto made = Stage::create(m.table, o, b);
  CHECK_MSG(made.ok(), made.status().to_string().c_str());
  std::unique_ptr<Stage> stage = std::move(made).value();
  stage->load_weights(m.weights);
  return stage;
}

double relative_l2(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(error / norm);
}

class StageTest : public testing::TestWithParam<Dtype> {
 protected:
  void SetUp() override {
    if (GetParam() == Dtype::kBf16 && !cpu_->supports_bf16())
      GTEST_SKIP() << cpu_->description();
  }
  std::unique_ptr<kernels::Backend> cpu_ = kernels::make_cpu_backend(kThreads);
};

TEST_P(StageTest, AgreesWithTheReferenceBackend) {
  const Model m(false);
  const auto reference = kernels::make_reference_backend();
  double loss[2];
  std::vector<float> grads[2];
  int i = 0;
  for (kernels::Backend* b : {cpu_.get(), reference.get()}) {
    auto options = whole(GetParam());
    options.max_seq = 20;  // the reference is slow
    const auto stage = make(m, options, *b);
    MicroBatch mb = m.batch(0);
    mb.T = 20;
    loss[i] = stage->forward(0, mb, nullptr);
    grads[i] = m.zeros();
    stage->backward(0, 0.01, nullptr, grads[i], nullptr);
    ++i;
  }
  const double bound = GetParam() == Dtype::kFp32 ? 1e-5 : 1e-2;
  EXPECT_NEAR(loss[0] / loss[1], 1.0, bound);
  EXPECT_LT(relative_l2(grads[0], grads[1]), bound);
}

TEST_P(StageTest, RecomputationGivesTheSameBits) {
  for (const bool tied : {false, true}) {
    const Model m(tied);
    std::vector<float> grads[2] = {m.zeros(), m.zeros()};
    double loss[2];
    uint64_t activations[2];
    int i = 0;
    for (const Recompute r : {Recompute::kNone, Recompute::kFull}) {
      const auto stage = make(m, whole(GetParam(), r), *cpu_);
      loss[i] = stage->forward(0, m.batch(0), nullptr);
      stage->backward(0, 0.01, nullptr, grads[i], nullptr);
      activations[i] = stage->memory().activations;
      ++i;
    }
    EXPECT_EQ(loss[0], loss[1]);
    EXPECT_EQ(grads[0], grads[1]);
    EXPECT_LT(activations[1], activations[0]);
  }
}

TEST_P(StageTest, TwoStagesGiveTheBitsOfOne) {
  for (const bool tied : {false, true}) {
    const Model m(tied);
    const auto one = make(m, whole(GetParam()), *cpu_);
    std::vector<float> expected = m.zeros();
    const double loss = one->forward(0, m.batch(0), nullptr);
    one->backward(0, 0.01, nullptr, expected, nullptr);

    StageOptions first = whole(GetParam());
    first.num_layers = 2;
    first.has_head = false;
    StageOptions last = whole(GetParam());
    last.first_layer = 2;
    last.num_layers = 1;
    last.has_embedding = false;
    const auto a = make(m, first, *cpu_);
    const auto b = make(m, last, *cpu_);
    std::vector<float> grads = m.zeros();
    EXPECT_EQ(a->forward(0, m.batch(0), nullptr), 0.0);
    EXPECT_EQ(b->forward(0, m.batch(0), a->output(0)), loss);
    const float* dx = b->backward(0, 0.01, nullptr, grads, nullptr);
    ASSERT_NE(dx, nullptr);
    EXPECT_EQ(a->backward(0, 0.01, dx, grads, nullptr), nullptr);
    EXPECT_EQ(grads, expected);
  }
}

TEST_P(StageTest, SlotsInFlightDoNotDisturbEachOther) {
  const Model m(false);
  for (const Recompute r : {Recompute::kNone, Recompute::kFull}) {
    StageOptions options = whole(GetParam(), r);
    const auto serial = make(m, options, *cpu_);
    std::vector<float> expected = m.zeros();
    double loss[2];
    for (const int i : {0, 1}) {
      loss[i] = serial->forward(0, m.batch(i), nullptr);
      serial->backward(0, 0.01, nullptr, expected, nullptr);
    }
    options.num_slots = 2;
    const auto stage = make(m, options, *cpu_);
    std::vector<float> grads = m.zeros();
    for (const int i : {0, 1})
      EXPECT_EQ(stage->forward(i, m.batch(i), nullptr), loss[i]);
    // Evaluation between forward and backward leaves the slots alone.
    EXPECT_EQ(stage->evaluate(m.batch(1), nullptr), loss[1]);
    for (const int i : {0, 1})
      stage->backward(i, 0.01, nullptr, grads, nullptr);
    EXPECT_EQ(grads, expected);
  }
}

TEST_P(StageTest, SameRunGivesTheSameBits) {
  const Model m(false);
  std::vector<float> grads[2] = {m.zeros(), m.zeros()};
  for (std::vector<float>& g : grads) {
    const auto backend = kernels::make_cpu_backend(kThreads);
    const auto stage = make(m, whole(GetParam()), *backend);
    for (const int i : {0, 1}) {
      stage->forward(0, m.batch(i), nullptr);
      stage->backward(0, 0.01, nullptr, g, nullptr);
    }
  }
  EXPECT_EQ(grads[0], grads[1]);
}

TEST_P(StageTest, ShorterMicrobatchFitsALargerStage) {
  const Model m(false);
  StageOptions large = whole(GetParam());
  large.max_batch = 3;
  large.max_seq = 90;
  std::vector<float> a = m.zeros();
  std::vector<float> b = m.zeros();
  const auto x = make(m, large, *cpu_);
  const auto y = make(m, whole(GetParam()), *cpu_);
  EXPECT_EQ(x->forward(0, m.batch(0), nullptr),
            y->forward(0, m.batch(0), nullptr));
  x->backward(0, 0.01, nullptr, a, nullptr);
  y->backward(0, 0.01, nullptr, b, nullptr);
  EXPECT_EQ(a, b);
}

TEST_P(StageTest, AnnouncesEachGradientOnceAndWhenItIsFinal) {
  for (const bool tied : {false, true}) {
    const Model m(tied);
    const auto stage = make(m, whole(GetParam()), *cpu_);
    std::vector<float> grads = m.zeros();
    std::vector<std::vector<float>> seen(m.table.size());
    std::vector<size_t> order;
    const auto part = [&](size_t i) {
      const auto at = grads.begin() + m.table.offset(i);
      return std::vector<float>(at, at + m.table[i].numel());
    };
    stage->forward(0, m.batch(0), nullptr);
    stage->backward(0, 0.01, nullptr, grads, [&](size_t i) {
      EXPECT_TRUE(seen[i].empty()) << m.table[i].name;
      seen[i] = part(i);
      order.push_back(i);
    });
    EXPECT_EQ(order.size(), m.table.size());
    EXPECT_EQ(order.back(), 0U);  // the embedding
    for (size_t i = 0; i < m.table.size(); ++i)
      EXPECT_EQ(seen[i], part(i)) << m.table[i].name;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, StageTest,
                         testing::Values(Dtype::kFp32, Dtype::kBf16),
                         [](const auto& info) {
                           return std::string(kernels::dtype_name(info.param));
                         });

TEST(Stage, TakesBf16OnlyWhereTheBackendFindsThatItPays) {
  const auto backend = kernels::make_cpu_backend(kThreads);
  if (!backend->supports_bf16()) GTEST_SKIP() << backend->description();
  const Model m(false);
  ASSERT_EQ(backend->product_dtype(Dtype::kBf16, m.table.config().dim),
            Dtype::kFp32);
  std::vector<float> grads[2] = {m.zeros(), m.zeros()};
  int i = 0;
  for (const Dtype d : {Dtype::kFp32, Dtype::kBf16}) {
    StageOptions o = whole(d);
    o.keep_dtype = false;
    const auto stage = make(m, o, *backend);
    EXPECT_EQ(stage->dtype(), Dtype::kFp32);
    stage->forward(0, m.batch(0), nullptr);
    stage->backward(0, 0.01, nullptr, grads[i++], nullptr);
  }
  EXPECT_EQ(grads[0], grads[1]);
  geometry::ModelConfig c = small_config(false);
  c.dim = 128;
  const auto large = geometry::ParamTable::llama(c);
  StageOptions o = whole(Dtype::kBf16);
  o.keep_dtype = false;
  EXPECT_EQ((*Stage::create(large, o, *backend))->dtype(), Dtype::kBf16);
  o.dtype = Dtype::kFp32;
  EXPECT_EQ((*Stage::create(large, o, *backend))->dtype(), Dtype::kFp32);
}

TEST(Stage, RefusesWhatDoesNotFit) {
  const Model m(false);
  const auto backend = kernels::make_cpu_backend(1);
  StageOptions o = whole(Dtype::kFp32);
  o.first_layer = 1;
  EXPECT_EQ(Stage::create(m.table, o, *backend).status().code(),
            Code::kInvalidArgument);
  o = whole(Dtype::kFp32);
  o.num_slots = 0;
  EXPECT_EQ(Stage::create(m.table, o, *backend).status().code(),
            Code::kInvalidArgument);
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
