#include "worker/sample/generator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "checkpoint/huggingface/weight_source.h"
#include "tests/unit/sample/small_generator.h"

namespace remesh::sample {
namespace {

std::vector<float> copy(std::span<const float> s) {
  return {s.begin(), s.end()};
}

TEST(Generator, ReadsAPromptInOneGoOrTokenByToken) {
  const SmallGenerator small;
  constexpr int64_t kTokens = 2 * Generator::kWindow + 7;
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < kTokens; ++i)
    tokens.push_back(static_cast<int32_t>(i * i % 257));
  const auto once = small.open(kTokens);
  const std::vector<float> want = copy(once->extend(tokens));
  EXPECT_EQ(once->length(), kTokens);
  EXPECT_EQ(want.size(), 257U);
  const auto one_by_one = small.open(kTokens);
  std::vector<float> got;
  for (const int32_t& t : tokens) got = copy(one_by_one->extend({&t, 1}));
  for (size_t i = 0; i < want.size(); ++i)
    EXPECT_NEAR(got[i], want[i], 1e-4 * (1 + std::abs(want[i])));
  // The logits depend on what came before.
  one_by_one->truncate(0);
  EXPECT_NE(copy(one_by_one->extend({&tokens.back(), 1})), got);
}

// The parts that are read one after the other are the whole.
TEST(Generator, LoadingSaysHowFarItIs) {
  const SmallGenerator small;
  const auto fs = posix_file_system();
  std::vector<uint64_t> done;
  ASSERT_OK_AND(const auto weights,
                open_weights(*fs, {.weights = small.files.path()},
                             [&](uint64_t now, uint64_t all) {
                               EXPECT_LE(now, all);
                               done.push_back(now);
                             }));
  const auto table = geometry::ParamTable::make(weights.model);
  std::vector<float> parts(static_cast<size_t>(table.num_elements())),
      whole(parts.size());
  ASSERT_OK(weights.load(table, parts));
  ASSERT_OK_AND(const auto source,
                huggingface::WeightSource::open(*fs, small.files.path()));
  ASSERT_OK(source.load(table, geometry::whole_pieces(table), whole, [] {}));
  EXPECT_EQ(parts, whole);
  ASSERT_GT(done.size(), 1U);
  EXPECT_TRUE(std::is_sorted(done.begin(), done.end()));
  EXPECT_EQ(done.back(), 4 * whole.size());
}

TEST(Generator, ALossBeyondASlidingWindowIsThatOfTheTokensOneByOne) {
  constexpr int64_t kTokens = 41;
  const SmallGenerator small(/*sliding_window=*/9);
  const auto g = small.open(kTokens);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < kTokens; ++i)
    tokens.push_back(static_cast<int32_t>(i * i % 257));
  double want = 0;
  for (size_t i = 0; i + 1 < tokens.size(); ++i) {
    const std::span<const float> logits = g->extend({&tokens[i], 1});
    double sum = 0;
    for (const float x : logits) sum += std::exp(x);
    want += std::log(sum) - logits[static_cast<size_t>(tokens[i + 1])];
  }
  EXPECT_NEAR(g->loss(tokens), want, 1e-5 * want);
  EXPECT_GT(std::abs(SmallGenerator().open(kTokens)->loss(tokens) - want),
            1e-4 * want);
}

}  // namespace
}  // namespace remesh::sample
