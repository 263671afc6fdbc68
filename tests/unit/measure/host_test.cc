#include "worker/measure/host.h"

#include "parallel/jobfile/jobfile.h"
#include "tests/testing/expect.h"
#include "tests/testing/local_comm.h"

namespace remesh::measure {
namespace {

// Bounds that no machine on which the tests run comes near.
TEST(Host, IsMeasuredByAllRanksAtOnce) {
  constexpr int kRanks = 3;
  std::vector<Measured> results(kRanks);
  comm::on_ranks(kRanks, [&](comm::Comm& comm) {
    const auto backend = kernels::make_cpu_backend(1);
    auto m = measure_host(comm, *backend);
    ASSERT_OK(m);
    results[static_cast<size_t>(comm.rank())] = *std::move(m);
  });
  for (const Measured& m : results) {
    EXPECT_EQ(m.ranks, kRanks);
    EXPECT_GE(m.cores, 1);
    const GemmFit fit = fit_gemms(m.fp32);
    EXPECT_GT(fit.flops, 1e7);
    EXPECT_LT(fit.flops, 1e14);
    EXPECT_GT(m.attention_flops, 1e6);
    EXPECT_GT(m.memory_bytes_per_s, 1e6);
    EXPECT_GT(m.message_s, 0);
    EXPECT_GT(m.gather_bytes_per_s, 1e4);
    EXPECT_GE(m.straggle, 0);
    // The same on all ranks.
    EXPECT_EQ(m.attention_flops, results[0].attention_flops);
    EXPECT_EQ(m.contention, results[0].contention);
    EXPECT_EQ(m.gather_bytes_per_s, results[0].gather_bytes_per_s);
  }
  EXPECT_FALSE(processor_name().empty());
  EXPECT_GE(network_speed(), 0);
}

// What a worker reports is a valid description.
TEST(Host, CoresAreMeasuredTogether) {
  ASSERT_OK_AND(const auto m, measure_cores(2));
  Measured measured = m;
  measured.network_bytes_per_s = 1e8;
  pb::Cluster read;
  ASSERT_OK(jobfile::parse_description(
      jobfile::description_text(describe(measured)), {}, &read));
  EXPECT_GT(read.device().peak_fp32_tflops(), 1e-5);
  EXPECT_EQ(m.bf16.empty(), m.bf16_attention_flops == 0);
}

}  // namespace
}  // namespace remesh::measure
