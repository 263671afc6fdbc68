// Low-rank adapters against the complete model with the sum as its weights.
#include "parallel/geometry/lora.h"

#include <gtest/gtest.h>

#include "tests/testing/llama.h"
#include "tests/unit/model/model_fixture.h"

namespace remesh::model {
namespace {

constexpr int64_t kB = 2, kT = 12, kRank = 3;

geometry::ModelConfig config_of(const std::string& arch, bool tied) {
  geometry::ModelConfig c = geometry::llama(24, 4, 4, 2, 52, 61, tied);
  c.arch = arch;
  return c;
}

// Adapters of which neither factor is zero, on `base`.
Model adapters_on(const Model& base, const std::vector<std::string>& targets) {
  geometry::ModelConfig config = base.table.config();
  config.lora = {.rank = kRank, .alpha = 5, .targets = targets};
  Model m(config, 1, 3);
  for (size_t i = 0; i < m.weights.size(); ++i)
    m.weights[i] = 0.1F * random_normal(7, 0, i);
  m.tokens = base.tokens;
  m.base = &base;
  return m;
}

// f(the matrix's index in the base, its A's among the adapters).
template <typename F>
void for_each_target(const Model& adapters, const F& f) {
  const geometry::ParamTable& table = adapters.table;
  for (size_t a = 0; a < table.size(); a += 2)
    f(static_cast<size_t>(
          adapters.base->table.find(table[a].role, table[a].layer)),
      a);
}

const float* values(const Model& m, size_t i) {
  return m.weights.data() + m.table.offset(i);
}

Model sum_of(const Model& adapters) {
  Model out = *adapters.base;
  const double s = adapters.table.config().lora.scale();
  for_each_target(adapters, [&](size_t w, size_t a) {
    const auto& shape = out.table[w].shape;
    for (int64_t i = 0; i < shape[0]; ++i)
      for (int64_t j = 0; j < shape[1]; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < kRank; ++k)
          sum += static_cast<double>(values(adapters, a + 1)[i * kRank + k]) *
                 values(adapters, a)[k * shape[1] + j];
        out.weights[static_cast<size_t>(out.table.offset(w) + i * shape[1] +
                                        j)] += static_cast<float>(s * sum);
      }
  });
  return out;
}

// Those of the adapters, from the gradient of the sum.
std::vector<float> expected_grads(const Model& adapters,
                                  const std::vector<float>& of_sum) {
  std::vector<double> out(adapters.weights.size());
  const double s = adapters.table.config().lora.scale();
  for_each_target(adapters, [&](size_t w, size_t a) {
    const auto& shape = adapters.base->table[w].shape;
    const float* const g = of_sum.data() + adapters.base->table.offset(w);
    double* const da = out.data() + adapters.table.offset(a);
    double* const db = out.data() + adapters.table.offset(a + 1);
    for (int64_t i = 0; i < shape[0]; ++i)
      for (int64_t j = 0; j < shape[1]; ++j)
        for (int64_t k = 0; k < kRank; ++k) {
          const double d = s * g[i * shape[1] + j];
          da[k * shape[1] + j] += d * values(adapters, a + 1)[i * kRank + k];
          db[i * kRank + k] += d * values(adapters, a)[k * shape[1] + j];
        }
  });
  return {out.begin(), out.end()};
}

void expect_like_sum(const Model& adapters, const Pipeline& p,
                     const StageOptions& o, const geometry::Layout& layout) {
  // Where queries and keys are normalised, changes of 1e-7 in the weights move
  // the gradients of this model by up to 2e-4.
  const double bound = adapters.table.config().arch == "qwen3" ? 5e-4 : 1e-5;
  const Passed want = run_split(sum_of(adapters), p, o, layout);
  const Passed got = run_split(adapters, p, o, layout);
  const bool fp32 = o.dtype == Dtype::kFp32;
  for (size_t i = 0; i < want.loss.size(); ++i)
    EXPECT_NEAR(got.loss[i] / want.loss[i], 1, fp32 ? 1e-6 : 1e-3);
  EXPECT_LT(relative_l2(got.grads, expected_grads(adapters, want.grads)),
            fp32 ? bound : 1e-2)
      << layout.to_string() << " chunks " << p.chunks;
}

TEST(Lora, LossAndGradientsAreThoseOfTheSum) {
  for (const std::string arch : {"llama", "qwen2", "qwen3"})
    for (const bool tied : {false, true}) {
      const Model base(config_of(arch, tied), 3 * kB * kT + 1, 1);
      for (const std::vector<std::string>& targets :
           {geometry::lora_targets(), {"v_proj"}, {"o_proj", "up_proj"}}) {
        const Model m = adapters_on(base, targets);
        const StageOptions o{.max_batch = kB, .max_seq = kT};
        StageOptions split = o;
        split.split_backward = true;
        StageOptions few = o;
        few.recompute.assign(4, Recompute::kFull);
        expect_like_sum(m, {.microbatches = 2}, o, {});
        expect_like_sum(m, {.pp = 2, .microbatches = 2}, split, {.tp = 2});
        expect_like_sum(m, {.pp = 2, .chunks = 2}, few, {.tp = 4});
        expect_like_sum(m, {}, o, {.tp = 2, .cp = 3});
      }
    }
}

TEST(Lora, LossAndGradientsAreThoseOfTheSumInBf16) {
  if (!kernels::make_cpu_backend(1)->supports_bf16())
    GTEST_SKIP() << "needs bf16";
  const Model base(config_of("llama", false), 3 * kB * kT + 1, 1);
  const Model m = adapters_on(base, geometry::lora_targets());
  const StageOptions o{.dtype = Dtype::kBf16, .max_batch = kB, .max_seq = kT};
  expect_like_sum(m, {.microbatches = 2}, o, {});
  expect_like_sum(m, {.pp = 2}, o, {.tp = 2});
}

// Loaded again, adapters are added to the frozen weights, not to the last sum.
TEST(Lora, AdaptersReplaceThoseBefore) {
  const auto backend = kernels::make_cpu_backend(1);
  for (const Dtype d : {Dtype::kFp32, Dtype::kBf16}) {
    if (d == Dtype::kBf16 && !backend->supports_bf16()) continue;
    const Model base(config_of("llama", true), kT + 1, 1);
    const Model m = adapters_on(base, geometry::lora_targets());
    RankModel rank(m, {}, {}, 1, {.dtype = d, .max_seq = kT}, *backend);
    const auto loss = [&] {
      return rank.stages[0]->evaluate(m.batch(0, 1, kT - 1), nullptr,
                                      rank.hooks);
    };
    const double first = loss();
    std::vector<float> other = rank.weights;
    for (float& x : other) x *= 2;
    load_weights(*rank.stages[0], rank.shard, other);
    EXPECT_GT(std::abs(loss() - first), 1e-3);
    load_weights(*rank.stages[0], rank.shard, rank.weights);
    EXPECT_EQ(loss(), first);
  }
}

}  // namespace
}  // namespace remesh::model
