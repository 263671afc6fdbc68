#include "worker/measure/measured.h"

#include <random>

#include "parallel/jobfile/jobfile.h"
#include "parallel/planner/layer_cost.h"
#include "tests/testing/expect.h"
#include "tests/testing/seed.h"

namespace remesh::measure {
namespace {

constexpr double kSizes[][3] = {{256, 512, 64},    {256, 512, 512},
                                {256, 512, 2048},  {512, 1024, 256},
                                {512, 1024, 1024}, {256, 256, 256}};

std::vector<GemmTime> times_of(const GemmFit& truth, double noise,
                               std::mt19937_64& rng) {
  std::normal_distribution<double> error(1, noise);
  std::vector<GemmTime> out;
  for (const auto& [rows, columns, inner] : kSizes) {
    GemmTime t{.rows = rows, .columns = columns, .inner = inner};
    t.seconds = (truth.gap_s +
                 2 * rows * columns * (inner + truth.ramp) / truth.flops) *
                error(rng);
    out.push_back(t);
  }
  return out;
}

TEST(FitGemms, FindsWhatMadeTheTimes) {
  std::mt19937_64 rng(test_seed());
  for (const GemmFit truth : {GemmFit{1e11, 20, 5e-6}, GemmFit{2e12, 0, 1e-6},
                              GemmFit{5e10, 60, 0}}) {
    const GemmFit exact = fit_gemms(times_of(truth, 0, rng));
    EXPECT_NEAR(exact.flops / truth.flops, 1, 1e-6);
    EXPECT_NEAR(exact.ramp, truth.ramp, 1e-3);
    EXPECT_NEAR(exact.gap_s, truth.gap_s, 1e-9);
    const GemmFit noisy = fit_gemms(times_of(truth, 0.02, rng));
    EXPECT_NEAR(noisy.flops / truth.flops, 1, 0.1);
    EXPECT_GE(noisy.ramp, 0);
    EXPECT_GE(noisy.gap_s, 0);
  }
}

Measured example() {
  std::mt19937_64 rng(1);
  Measured m{.processor = "any", .cores = 4, .memory_bytes = 32e9};
  m.fp32 = times_of({1e11, 20, 5e-6}, 0, rng);
  m.attention_flops = 4e10;
  m.memory_bytes_per_s = 5e9;
  m.ranks = 4;
  m.message_s = 3e-6;
  m.small_gather_s = 7e-6;
  m.gather_bytes_per_s = 2e9;
  m.contention = 0.6;
  m.straggle = 0.02;
  m.network_bytes_per_s = 1.25e9;
  return m;
}

// The planner computes with the rates that were measured.
TEST(Describe, IsAClusterWhoseRatesAreThoseMeasured) {
  const std::string text = jobfile::description_text(describe(example()));
  pb::Cluster cluster;
  ASSERT_OK(jobfile::parse_description(text, {"local"}, &cluster)) << text;
  const planner::Machine m = planner::machine_of(cluster);
  EXPECT_EQ(m.node_devices, 4);
  EXPECT_NEAR(m.memory_bytes, 8e9, 1);
  EXPECT_NEAR(m.node_bytes_per_s, 2e9, 1);
  EXPECT_NEAR(m.network_bytes_per_s * m.node_devices, 1.25e9, 1);
  EXPECT_NEAR(m.node_hop_s, 2e-6, 1e-12);
  EXPECT_NEAR(m.collective_base_s, 1e-6, 1e-12);
  EXPECT_NEAR(m.contention, 0.6, 1e-12);
  EXPECT_NEAR(m.memory_bytes_per_s, 5e9, 1);
  for (const GemmTime& t : example().fp32) {
    const double predicted = planner::gemm_s(m, {t.rows, t.columns, t.inner},
                                             planner::Precision::k32);
    EXPECT_NEAR(predicted / t.seconds, 1, 0.1)
        << t.rows << " " << t.columns << " " << t.inner;
  }
}

TEST(Describe, WithoutBf16ItsRateIsThatOfFp32) {
  Measured m = example();
  EXPECT_EQ(describe(m).device().peak_tflops(),
            describe(m).device().peak_fp32_tflops());
  m.bf16 = m.fp32;
  for (GemmTime& t : m.bf16) t.seconds /= 8;
  EXPECT_NEAR(describe(m).device().peak_tflops() /
                  describe(m).device().peak_fp32_tflops(),
              8, 1e-6);
}

}  // namespace
}  // namespace remesh::measure
