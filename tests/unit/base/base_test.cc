#include <gtest/gtest.h>

#include <cmath>

#include "proto/base/log.h"
#include "proto/base/rng.h"
#include "proto/base/status.h"
#include "proto/base/text.h"

namespace remesh {
namespace {

Result<int> half(int x) {
  if (x % 2 != 0) return invalid_argument("x must be even");
  return x / 2;
}
Result<int> quarter(int x) {
  ASSIGN_OR_RETURN(const int h, half(x));
  return half(h);
}

TEST(Status, FailurePassesThroughAssignOrReturn) {
  EXPECT_EQ(*quarter(8), 2);
  EXPECT_EQ(quarter(6).status().to_string(),
            "invalid_argument: x must be even");
  EXPECT_EQ(quarter(6).status().with_context("job").message(),
            "job: x must be even");
}

TEST(Log, ValuesWithSpacesAreQuoted) {
  EXPECT_EQ(format_event("rank_failed", {{"rank", 3}, {"cause", "signal 9"}}),
            "rank_failed rank=3 cause=\"signal 9\"");
  EXPECT_EQ(format_event("x", {{"k", "a\"b\n"}}), "x k=\"a\\\"b\\n\"");
}

// Known answers of Philox4x32-10 from Random123's kat_vectors.
TEST(Rng, PhiloxGivesTheKnownAnswers) {
  const auto zero = philox(0, 0, 0);
  EXPECT_EQ(zero[0], 0x6627e8d5U);
  EXPECT_EQ(zero[3], 0x9b00dbd8U);
  const auto ones = philox(~0ULL, ~0ULL, ~0ULL);
  EXPECT_EQ(ones[0], 0x408f276dU);
}

TEST(Rng, NormalsHaveUnitVarianceAndNoMean) {
  double sum = 0;
  double squares = 0;
  constexpr int kCount = 100000;
  for (int i = 0; i < kCount; ++i) {
    const double x = random_normal(7, 1, static_cast<uint64_t>(i));
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / kCount, 0, 0.02);
  EXPECT_NEAR(squares / kCount, 1, 0.02);
}

TEST(Text, NearestNameFindsATypoButNotAStranger) {
  EXPECT_EQ(nearest_name("stesp", {"seq_len", "steps"}), "steps");
  EXPECT_EQ(nearest_name("banana", {"seq_len", "steps"}), "");
  EXPECT_EQ(format_duration(200), "3m20s");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
}

}  // namespace
}  // namespace remesh
