// extend() against evaluate() of the whole sequence.
#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "tests/testing/expect.h"
#include "tests/testing/llama.h"
#include "tests/testing/seed.h"
#include "tests/unit/model/model_fixture.h"

namespace remesh::model {
namespace {

constexpr int64_t kTokens = 24;

// Logits of what follows the last of the tokens.
using Logits = std::vector<float>;

class Continued {
 public:
  Continued(const Model& model, const StageOptions& options,
            kernels::Backend& backend)
      : rank_(model, {}, {}, 1, options, backend),
        vocab_(model.table.config().vocab_size) {}

  Logits extend(std::span<const int32_t> tokens) {
    stage().extend(tokens, rank_.hooks);
    Logits out(static_cast<size_t>(vocab_));
    stage().logits(0, 1, out);
    return out;
  }
  // In one go, without a cache.
  Logits evaluate(std::span<const int32_t> tokens) {
    const auto n = static_cast<int64_t>(tokens.size());
    stage().evaluate({tokens.data(), tokens.data(), 1, n}, nullptr,
                     rank_.hooks);
    std::vector<float> all(static_cast<size_t>(n * vocab_));
    stage().logits(0, n, all);
    return {all.end() - vocab_, all.end()};
  }
  Stage& stage() { return *rank_.stages.front(); }

 private:
  RankModel rank_;
  int64_t vocab_;
};

geometry::ModelConfig config_of(const std::string& arch) {
  geometry::ModelConfig c = geometry::llama(32, 3, 4, 2, 48, 61);
  c.arch = arch;
  if (arch == "qwen3") c.set_head_dim(12);
  if (arch == "qwen2") c.tie_embeddings = true;
  return c;
}

TEST(Extend, GivesTheLogitsOfTheWholeSequence) {
  std::mt19937_64 rng(test_seed());
  const auto backend = kernels::make_cpu_backend(1);
  for (const std::string arch : {"llama", "mistral", "qwen2", "qwen3", "phi3"})
    for (const Dtype d : {Dtype::kFp32, Dtype::kBf16}) {
      if (d == Dtype::kBf16 && !backend->supports_bf16()) continue;
      SCOPED_TRACE(fmt::format("{} {}", arch, d == Dtype::kFp32));
      const Model m(config_of(arch), kTokens, rng());
      const std::span tokens = std::span(m.tokens).first(kTokens);
      Continued with(m, {.dtype = d, .max_seq = 10, .cache = kTokens},
                     *backend);
      Continued without(m, {.dtype = d, .max_seq = kTokens}, *backend);
      for (size_t at = 0; at < tokens.size();) {
        const size_t n = std::min(tokens.size() - at, 1 + rng() % 10);
        const Logits got = with.extend(tokens.subspan(at, n));
        at += n;
        EXPECT_EQ(with.stage().length(), static_cast<int64_t>(at));
        EXPECT_LT(relative_l2(got, without.evaluate(tokens.first(at))),
                  d == Dtype::kFp32 ? 1e-5 : 2e-2)
            << at << " tokens";
      }
    }
}

TEST(Extend, GoesOnFromWhereTheSequenceWasCut) {
  const auto backend = kernels::make_cpu_backend(1);
  const Model m(config_of("llama"), kTokens, test_seed());
  const std::span tokens = std::span(m.tokens).first(kTokens);
  Continued c(m, {.max_seq = kTokens, .cache = kTokens}, *backend);
  c.extend(tokens.first(8));
  const Logits once = c.extend(tokens.subspan(8, 4));
  c.extend(tokens.subspan(12, 12));
  c.stage().truncate(8);
  EXPECT_EQ(c.extend(tokens.subspan(8, 4)), once);
}

// What a token of a model of one layer sees through its window is a sequence of
// its own, because rotary positions are relative.
TEST(Extend, AttendsOverAWindow) {
  geometry::ModelConfig config = config_of("mistral");
  config.n_layers = 1;
  config.sliding_window = 5;
  const auto backend = kernels::make_cpu_backend(1);
  const Model m(config, kTokens, test_seed());
  const std::span tokens = std::span(m.tokens).first(kTokens);
  Continued with(m, {.max_seq = 7, .cache = kTokens}, *backend);
  Continued without(m, {.max_seq = 5}, *backend);
  for (size_t at = 0; at < tokens.size();) {
    const size_t n = std::min(tokens.size() - at, 1 + at % 7);
    const Logits got = with.extend(tokens.subspan(at, n));
    at += n;
    const size_t seen = std::min<size_t>(at, 5);
    EXPECT_LT(
        relative_l2(got, without.evaluate(tokens.subspan(at - seen, seen))),
        1e-4)
        << at << " tokens";
  }
}

TEST(Extend, NeedsTheWholeModel) {
  const auto backend = kernels::make_cpu_backend(1);
  const Model m(config_of("llama"), kTokens, 1);
  const auto shard = make_shard(m.table, {.pp = 2}, {});
  EXPECT_SAYS(Stage::create(shard, {.max_seq = 4, .cache = 8}, *backend),
              "a cache of 8 tokens");
}

}  // namespace
}  // namespace remesh::model
