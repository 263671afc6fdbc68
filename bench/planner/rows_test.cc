#include "bench/planner/rows.h"

#include <gtest/gtest.h>

#include "bench/planner/validation.h"
#include "tests/testing/expect.h"

namespace remesh::bench {
namespace {

constexpr char kHeader[] =
    "source,where_in_source,model,params_b,layers,hidden,heads,kv_heads,"
    "ffn_hidden,vocab,seq,gpu,n_gpus,tp,pp,dp,cp,zero_stage,micro_batch,"
    "global_batch,recompute,dtype,tokens_per_s_per_gpu,tflops_per_gpu,mfu_pct,"
    "verified\n";
constexpr char kRow[] =
    "A paper,\"Table 1, VP=3\",GPT-18B,18,40,6144,48,48,24576,51200,2048,"
    "A100-80GB (Selene),64,8,2,4,1,0,2,256,full,fp16,871.6,135,32.6,yes\n";

// Each is replaced once.
using Edits = std::vector<std::pair<std::string, std::string>>;

std::string edited(const Edits& edits,
                   std::string text = std::string(kHeader) + kRow) {
  for (const auto& [from, to] : edits)
    text.replace(text.find(from), from.size(), to);
  return text;
}

Row row_with(const Edits& edits) {
  return parse_rows(edited(edits), "x.csv").value().front();
}

std::string problem(const std::string& from, const std::string& to) {
  return parse_rows(edited({{from, to}}), "x.csv").status().message();
}

TEST(Rows, AreReadByColumnName) {
  const auto rows = parse_rows(edited({}), "x.csv");
  ASSERT_TRUE(rows.ok()) << rows.status().message();
  ASSERT_EQ(rows->size(), 1u);
  const Row& r = rows->front();
  EXPECT_EQ(r.device, "A100");
  EXPECT_EQ(r.memory_gb, 80);
  EXPECT_EQ(r.layout, (geometry::Layout{.dp = 4, .pp = 2, .tp = 8}));
  EXPECT_EQ(r.shape.model.arch, "gpt");
  EXPECT_EQ(r.shape.chunks, 3);
  EXPECT_EQ(r.shape.recompute, geometry::Recompute::kFull);
  EXPECT_FALSE(r.run.fused_attention);
  EXPECT_FALSE(r.run.overlap_data);
}

TEST(Rows, NotesSayWhatTheColumnsDoNot) {
  const auto run = [](const std::string& note) {
    return row_with(
        {{"Table 1, VP=3", note}, {",64,8,2,4,1,0,", ",64,8,2,4,1,3,"}});
  };
  EXPECT_TRUE(run("compile+float8").run.fused_kernels);
  EXPECT_FALSE(run("op SAC; no compile").run.fused_kernels);
  EXPECT_TRUE(run("AsyncTP").run.overlap_tensor);
  EXPECT_FALSE(run("vanilla TP").run.overlap_tensor);
  EXPECT_TRUE(run("FA2").run.fused_attention);
  EXPECT_EQ(run("Interleaved 1F1B").shape.chunks, 2);
  EXPECT_EQ(run("VP=n/a").shape.chunks, 1);
}

TEST(Rows, NotesOfOneDeviceSayHowItComputes) {
  const auto run = [](const std::string& note) {
    return row_with({{"Table 1, VP=3", note}}).run;
  };
  EXPECT_TRUE(run("").fused_kernels);
  EXPECT_FALSE(run("no compile").fused_kernels);
  EXPECT_FALSE(run("").tuned_attention);
  EXPECT_TRUE(run("cuDNN attention").tuned_attention);
  EXPECT_EQ(run("").accumulation_bytes, 0);
  EXPECT_EQ(run("autocast").accumulation_bytes, 24);
}

// FlashAttention is older than the H100.
TEST(Rows, OnlyOldDevicesAreAsOldAsFp16) {
  const auto run = [](const std::string& device, const std::string& dtype) {
    return row_with({{"A100-80GB", device},
                     {",64,8,2,4,1,0,", ",64,8,2,4,1,1,"},
                     {",fp16,", "," + dtype + ","}})
        .run;
  };
  for (const char* device : {"V100", "A100-80GB"}) {
    EXPECT_FALSE(run(device, "fp16").fused_attention) << device;
    EXPECT_FALSE(run(device, "fp16").overlap_data) << device;
    EXPECT_EQ(run(device, "fp16").gradient_bytes, 2) << device;
  }
  const planner::Execution half = run("H100", "fp16"),
                           bf16 = run("H100", "bf16");
  EXPECT_TRUE(half.fused_attention);
  EXPECT_TRUE(half.overlap_data);
  EXPECT_EQ(half.gradient_bytes, bf16.gradient_bytes);
  EXPECT_EQ(bf16.weight_bytes, 2);
  EXPECT_EQ(run("H100", "fp32").weight_bytes, 4);
  EXPECT_EQ(run("H100", "fp32").message_bytes, 4);
}

TEST(Rows, ANoteDeniesFlashAttentionOfAnyAge) {
  const auto fused = [](const std::string& note) {
    return row_with({{"Table 1, VP=3", note}, {",fp16,", ",bf16,"}})
        .run.fused_attention;
  };
  EXPECT_TRUE(fused("ALiBi"));
  EXPECT_FALSE(fused("ALiBi, no FlashAttention"));
}

TEST(Rows, TheNumberOfDevicesFollowsFromTheLayout) {
  EXPECT_EQ(problem(",64,8,2,4,", ",,8,2,4,"), "");
  EXPECT_EQ(problem(",64,8,2,4,", ",64,8,2,,"), "");
  EXPECT_NE(problem(",64,8,2,4,", ",,8,2,,"), "");
}

TEST(Rows, AQuotedFieldMayHaveLineBreaks) {
  const auto rows =
      parse_rows(edited({{"Table 1, VP=3", "Table 1,\r\n\nVP=5"}},
                        std::string(kHeader) + "\r\n" + kRow + kRow),
                 "x.csv");
  ASSERT_TRUE(rows.ok()) << rows.status().message();
  ASSERT_EQ(rows->size(), 2u);
  EXPECT_EQ((*rows)[0].line, 3);
  EXPECT_EQ((*rows)[0].shape.chunks, 5);
  EXPECT_EQ((*rows)[1].line, 6);
  EXPECT_EQ(problem("VP=3\"", "VP=3"), "x.csv:2: a quote is not closed");
  EXPECT_EQ(problem("source,", "\"source,"), "x.csv:1: a quote is not closed");
}

TEST(Rows, BlanksAroundAFieldAndCaseDoNotMatter) {
  const Row row = row_with({{"A100-80GB (Selene),64,8", " a100 80gb\t, 64 ,8 "},
                            {",full,fp16,", ",Full,BF16,"}});
  EXPECT_EQ(row.device, "A100");
  EXPECT_EQ(row.memory_gb, 80);
  EXPECT_EQ(row.world, 64);
}

TEST(Rows, RecalledRowsAreSkipped) {
  EXPECT_EQ(problem(",yes", ",memory"), "x.csv: no row to compare with");
  EXPECT_EQ(problem(",yes", ",Memory"), "x.csv: no row to compare with");
}

TEST(Rows, ErrorsNameLineColumnAndWhatIsAllowed) {
  EXPECT_EQ(problem("source,", "origin,"), "x.csv: missing columns: source");
  EXPECT_EQ(problem(",40,6144", ",forty,6144"),
            "x.csv:2: layers = 'forty': must be a number from 1 to 1000000000");
  EXPECT_EQ(problem(",64,8,2,4", ",65,8,2,4"),
            "x.csv:2: n_gpus = '65': must be tp x pp x dp x cp = 64");
  EXPECT_EQ(problem(",full,", ",half,"),
            "x.csv:2: recompute = 'half': must be none, selective, full or "
            "empty");
  EXPECT_EQ(problem("A100-80GB (Selene)", ""),
            "x.csv:2: gpu = '': must be the name of a device, such as A100 or "
            "H100");
  EXPECT_EQ(problem(",871.6,", ",-3,").substr(0, 41),
            "x.csv:2: tokens_per_s_per_gpu = '-3': mus");
  EXPECT_EQ(problem(",yes", ",yes,extra"),
            "x.csv:2: 27 fields, the header has 26");
  EXPECT_EQ(problem(",48,48,", ",48,5,"),
            "x.csv:2: model.n_kv_heads = 5: must divide model.n_heads = 48");
  EXPECT_EQ(problem(",cp,", ",tp,"), "x.csv: missing columns: cp");
  EXPECT_EQ(problem(",mfu_pct,", ",tp,"),
            "x.csv: columns that occur twice: tp");
  EXPECT_EQ(problem("mfu_pct", "tflops_per_gpu"), "");  // it is not used
  for (const char* path : {"no_such.csv", "bench/planner/data"})
    EXPECT_EQ(read_rows(path).status().message(),
              std::string(path) + ": cannot be read");
}

TEST(Rows, ALongNameOfADeviceIsRefused) {
  for (const char* c : {"A", "9"}) {
    std::string name = "A100";
    for (int i = 0; i < 200'000; ++i) name += c;
    const std::string text = problem("A100-80GB", name + "GB");
    EXPECT_HAS(text, "': must be at most 256 characters");
    EXPECT_LT(text.size(), 400u);
  }
}

TEST(Rows, TheNumberOfRanksIsLimited) {
  const std::string many = "1000000000";
  EXPECT_EQ(problem(",64,8,2,4,", "," + many + ",8,2,4,"),
            "x.csv:2: n_gpus = '1000000000': must be a number from 1 to "
            "1048576");
  EXPECT_EQ(problem(",64,8,2,4,", ",64,1e300,2,4,"),
            "x.csv:2: tp = '1e300': must be a number from 1 to 1048576");
  for (const char* to : {",64,65536,65536,65536,", ",64,8,1048576,4,",
                         ",,1048576,1048576,1048576,"})
    EXPECT_HAS(problem(",64,8,2,4,", to),
               "must be tp x pp x dp x cp, at most 1048576")
        << to;
}

TEST(Rows, ALayoutThatIsNotGivenExists) {
  EXPECT_EQ(problem(",64,8,2,4,1,0,2,256,", ",64,,,,2,0,,,"), "");
  EXPECT_EQ(problem(",64,8,2,4,1,", ",3,,,,2,"),
            "x.csv:2: n_gpus = '3': must be a multiple of the given degrees = "
            "2");
  EXPECT_EQ(problem(",64,8,2,4,", ",64,,2,4,"), "") << "tp is 8";
  EXPECT_EQ(problem(",64,8,2,4,", ",64,,2,5,"),
            "x.csv:2: n_gpus = '64': must be a multiple of the given degrees = "
            "10");
}

TEST(Rows, AMicroBatchIsPartOfTheBatch) {
  EXPECT_EQ(problem(",2,256,", ",1000000000,4,"),
            "x.csv:2: micro_batch = '1000000000': must be at most "
            "global_batch");
  EXPECT_EQ(problem(",2,256,", ",,3,"), "");
  EXPECT_EQ(problem(",2,256,", ",2,,"), "");
}

TEST(Rows, AnUnknownDeviceIsAnErrorThatListsThoseKnown) {
  const auto clusters = read_clusters("deploy/clusters");
  ASSERT_TRUE(clusters.ok());
  Row row{.line = 7, .device = "TPU4"};
  EXPECT_EQ(cluster_of(*clusters, row).status().message(),
            "line 7: no cluster has the device 'TPU4'; there are A100, B200, "
            "GB200, H100, H200, MI250X, MI300X, V100; a description of another "
            "belongs to them, in the folder of --clusters");
}

// Such rows are no reason to compare none.
TEST(Rows, WhatThePlannerDoesNotKnowIsSkippedAndCounted) {
  const auto clusters = read_clusters("deploy/clusters").value();
  std::string text = std::string(kHeader) + kRow;
  for (const auto& [from, to] : {std::pair{",fp16,", ",mixed,"},
                                 {",fp16,", ",Mixed,"},
                                 {"A100-80GB (Selene)", "H800 80GB"},
                                 {"A100-80GB (Selene)", "GH200"},
                                 {"A100-80GB (Selene)", "Gaudi"},
                                 {"A100-80GB (Selene)", "8xH100"}})
    text += edited({{from, to}}, kRow);
  Skipped skipped;
  ASSERT_OK_AND(const auto rows, parse_rows(text, "x.csv", &skipped));
  ASSERT_OK_AND(const auto samples, samples_of(clusters, rows, &skipped));
  EXPECT_EQ(skipped, (Skipped{{"dtype mixed", 2},
                              {"gpu GAUDI", 1},
                              {"gpu GH200", 1},
                              {"gpu H800", 1}}));
  ASSERT_EQ(samples.size(), 2U);
  EXPECT_EQ(samples[0].row->device, "A100");
  EXPECT_EQ(samples[1].row->device, "H100");
  EXPECT_SAYS(samples_of(clusters, {rows[1]}), "no cluster has the device");
}

TEST(Rows, TheDeviceOfAClusterIsTheOneWithTheNearestMemory) {
  const auto clusters = read_clusters("deploy/clusters");
  ASSERT_TRUE(clusters.ok());
  const auto name = [&](const char* device, double memory) {
    Row row{.device = device, .memory_gb = memory};
    return (*clusters)[cluster_of(*clusters, row).value()].name;
  };
  EXPECT_EQ(name("A100", 40), "a100-40");
  EXPECT_EQ(name("A100", 0), "a100-80");
  EXPECT_EQ(name("H100", 94), "h100-96");
  EXPECT_EQ(name("H100", 0), "h100");
}

// One microbatch for each stage would leave the pipeline empty for half of the
// time.
TEST(Prediction, WhatARowLeavesOpenIsChosenAsAUserWould) {
  const auto clusters = read_clusters("deploy/clusters").value();
  const auto machine = planner::machine_of(clusters[1].cluster);
  const auto tokens = [&](const std::string& note, const char* batch) {
    const Row row = row_with({{"Table 1, VP=3", note},
                              {",64,8,2,4,1,0,2,", ",64,8,8,1,1,3,2,"},
                              {",2,256,full,fp16", batch}});
    return predict(machine, row).tokens_per_s;
  };
  const double open = tokens("", ",,256,full,bf16");
  EXPECT_GT(open, 1.5 * tokens("1F1B, local batch 256", ",,256,full,bf16"));
  EXPECT_GE(open, tokens("", ",1,256,full,bf16"));
  EXPECT_DOUBLE_EQ(open, tokens("interleave=2", ",,256,full,bf16"));
  EXPECT_LT(tokens("1F1B", ",,256,full,bf16"), open);
  EXPECT_LT(tokens("", ",1,16,full,bf16"), tokens("VP=2", ",1,16,full,bf16"))
      << "with a micro-batch the schedule is 1F1B unless the note says more";
}

TEST(Report, RankingsSeeTheOrderAndTheChoice) {
  std::vector<Row> rows(5);
  std::vector<Scored> scored;
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].tokens_per_s = 100 + static_cast<double>(i);
    scored.push_back({&rows[i], 200 - static_cast<double>(i)});
  }
  ASSERT_EQ(rankings(scored).size(), 1u);
  EXPECT_NEAR(rankings(scored)[0].spearman, -1, 1e-12);
  EXPECT_NEAR(rankings(scored)[0].regret, 4.0 / 104, 1e-12);
  for (Scored& s : scored) s.predicted = s.row->tokens_per_s;
  EXPECT_NEAR(rankings(scored)[0].spearman, 1, 1e-12);
  EXPECT_EQ(rankings(scored)[0].regret, 0);
}

// 27 of 30 are 8 % off. One sample, and none, are too few.
TEST(Report, ErrorsAreThoseOfNineOfTenSamples) {
  auto clusters = read_clusters("deploy/clusters").value();
  std::vector<Row> rows(31, row_with({}));
  std::vector<Sample> samples;
  for (Row& r : rows) samples.push_back({.row = &r, .cluster = 1});
  const double predicted = score(clusters, samples)[0].predicted;
  for (size_t i = 0; i < 30; ++i)
    rows[i].tokens_per_s = predicted / (i < 27 ? 1.08 : 1.5);
  rows[30].tokens_per_s = predicted;
  samples[30].cluster = 0;
  set_errors(samples, &clusters);
  EXPECT_EQ(clusters[1].cluster.efficiency().error(), 0.08);
  EXPECT_GE(clusters[0].cluster.efficiency().error(), 0.08);
  EXPECT_GE(clusters[2].cluster.efficiency().error(), 0.08) << "no samples";
}

// What fits a slow A100 says nothing of another chip, which is predicted as the
// A100 would be before anybody measured it.
TEST(Report, AChipWithoutSamplesMayBeAsFarOffAsBeforeTheFit) {
  auto clusters = read_clusters("deploy/clusters").value();
  clusters[1].cluster.mutable_efficiency()->set_gemm(0.1);
  Row row = row_with({});
  const std::vector<Sample> samples = {{.row = &row, .cluster = 1}};
  row.tokens_per_s = score(clusters, samples)[0].predicted;
  ASSERT_GT(score(fit(clusters, {}), samples)[0].error(), 1);
  set_errors(samples, &clusters);
  EXPECT_EQ(clusters[0].cluster.efficiency().error(), 0) << "the same chip";
  EXPECT_EQ(clusters[1].cluster.efficiency().error(), 0);
  for (size_t i = 2; i < clusters.size(); ++i)
    EXPECT_EQ(clusters[i].cluster.efficiency().error(), 0.99);
}

TEST(Report, ANewDeviceIsPredictedWithoutMeasurements) {
  const auto clusters = read_clusters("deploy/clusters").value();
  double before = 0;
  // Each is faster than the one before, and none than its peak.
  for (const char* device : {"V100", "A100-80GB", "MI300X (192GB)", "B200"}) {
    const std::vector<Row> rows = {row_with({{"A100-80GB (Selene)", device}})};
    const auto samples = samples_of(clusters, rows).value();
    const double speed = score(clusters, samples)[0].predicted;
    EXPECT_GT(speed, before) << device;
    const pb::Device& d = clusters[samples[0].cluster].cluster.device();
    EXPECT_LT(6 * 18e9 * speed, d.peak_tflops() * 1e12) << device;
    before = speed;
  }
}

// The shipped constants on the shipped measurements.
class Validation : public ::testing::Test {
 protected:
  void read(const char* file) {
    clusters_ = read_clusters("deploy/clusters").value();
    rows_ = read_rows(file).value();
    samples_ = samples_of(clusters_, rows_).value();
    scored_ = score(clusters_, samples_);
  }
  std::vector<ClusterFile> clusters_;
  std::vector<Row> rows_;
  std::vector<Sample> samples_;
  std::vector<Scored> scored_;
};

TEST_F(Validation, ThroughputIsWithinItsBounds) {
  read("bench/planner/data/throughput_rows.csv");
  ASSERT_EQ(scored_.size(), 252u);
  EXPECT_LE(mape(scored_), 0.08);
  std::vector<Scored> vtrain;
  for (const Scored& s : scored_)
    if (s.row->multi_node_vtrain) vtrain.push_back(s);
  ASSERT_EQ(vtrain.size(), 65u);
  EXPECT_LE(mape(vtrain), 0.10);
  double spearman = 0;
  const std::vector<Ranking> all = rankings(scored_);
  ASSERT_EQ(all.size(), 4u);
  for (const Ranking& r : all) {
    spearman += r.spearman / 4;
    EXPECT_LE(r.regret, 0.05) << r.model;
  }
  EXPECT_GE(spearman, 0.88);
}

TEST_F(Validation, MostRunsAreWithinTheErrorOfTheirCluster) {
  read("bench/planner/data/throughput_rows.csv");
  size_t within = 0;
  for (size_t i = 0; i < samples_.size(); ++i)
    if (scored_[i].error() <=
        clusters_[samples_[i].cluster].cluster.efficiency().error())
      ++within;
  EXPECT_NEAR(static_cast<double>(within), 0.9 * 252, 0.03 * 252);
}

TEST_F(Validation, SmallModelsInOneNodeAreWithinTheirBounds) {
  read("bench/planner/data/vtrain_single_node_a100.csv");
  ASSERT_EQ(scored_.size(), 864u);
  EXPECT_LE(mape(scored_), 0.12);
}

// The constants are those that the fit finds, and the fit sees through a wrong
// measurement: all rows of one chip 10 % slower change its constants.
TEST_F(Validation, TheFitFollowsTheMeasurements) {
  read("bench/planner/data/throughput_rows.csv");
  for (Row& r : rows_)
    if (r.device == "H100") r.tokens_per_s *= 0.9;
  std::vector<Sample> h100;
  for (const Sample& s : samples_)
    if (s.row->device == "H100") h100.push_back(s);
  const double before = mape(score(clusters_, h100));
  const double after = mape(score(fit(clusters_, h100), h100));
  EXPECT_LT(after, before - 0.03);
  EXPECT_LT(after, 0.07);
}

}  // namespace
}  // namespace remesh::bench
