#include "parallel/planner/description.h"

#include <filesystem>

#include "parallel/jobfile/jobfile.h"
#include "parallel/planner/collective.h"
#include "parallel/planner/layer_cost.h"
#include "tests/testing/expect.h"

namespace remesh::planner {
namespace {

namespace fs = std::filesystem;

constexpr char kCluster[] = R"([device]
name = "X1"
memory_gb = 80
memory_gb_per_s = 2000
peak_tflops = 300
[node]
devices = 8
gb_per_s = 300
[network]
gb_per_s = 25
[efficiency]
gemm = 0.5
)";

Status read(const std::string& toml, google::protobuf::Message* out) {
  return jobfile::parse_description(toml, {.name = "x.toml"}, out);
}
std::string problem(const std::string& toml) {
  pb::Cluster c;
  return read(toml, &c).message();
}
std::string replaced(std::string text, const std::string& a,
                     const std::string& b) {
  return text.replace(text.find(a), a.size(), b);
}

TEST(Cluster, BecomesRatesInSiUnits) {
  pb::Cluster c;
  ASSERT_OK(read(kCluster, &c));
  const Machine m = machine_of(c);
  EXPECT_DOUBLE_EQ(m.flops, 150e12);
  EXPECT_DOUBLE_EQ(m.peak_flops, 300e12);
  EXPECT_EQ(m.fp8_flops, 0);
  EXPECT_DOUBLE_EQ(m.memory_bytes, 80e9);
  EXPECT_DOUBLE_EQ(m.network_bytes_per_s, 25e9 * c.efficiency().network());
  EXPECT_EQ(m.node_devices, 8);
  EXPECT_EQ(m.oversubscription, 1);
  c.mutable_network()->set_switch_nodes(20);
  c.mutable_network()->set_oversubscription(3);
  EXPECT_EQ(machine_of(c).switch_devices, 160);
  EXPECT_EQ(machine_of(c).oversubscription, 3);
}

TEST(Cluster, ErrorsNameTheValueAndWhatIsAllowed) {
  EXPECT_EQ(problem(replaced(kCluster, "gemm = 0.5", "gemm = 1.5")),
            "x.toml:12: efficiency.gemm = 1.5: must be a number from 1e-12 to "
            "1");
  EXPECT_EQ(problem(replaced(kCluster, "= 300\n[node]", "= 1e-300\n[node]")),
            "x.toml:5: device.peak_tflops = 1e-300: must be a number from "
            "1e-12 to 1000000");
  EXPECT_EQ(problem(replaced(kCluster, "devices = 8", "devices = 0")),
            "x.toml:7: node.devices = 0: must be an integer from 1 to 1024");
  EXPECT_EQ(problem(replaced(kCluster, "peak_tflops", "peak_tflop")),
            "x.toml:5: device.peak_tflop: no such key; did you mean "
            "device.peak_tflops?");
  EXPECT_HAS(problem(replaced(kCluster, "[network]", "[net]")),
             "[net]: no such section");
}

TEST(Cluster, ARateThatMayBeLeftOutIsZeroOrNotTiny) {
  const auto with = [](const std::string& line) {
    return problem(replaced(kCluster, "[node]", line + "\n[node]"));
  };
  for (const char* key : {"peak_fp8_tflops", "peak_fp32_tflops"}) {
    EXPECT_EQ(with(key + std::string(" = 0")), "");
    EXPECT_EQ(with(key + std::string(" = 1e-300")),
              "x.toml:6: device." + std::string(key) +
                  " = 1e-300: must be a number, 0 or from 1e-12 to 1000000");
  }
  EXPECT_EQ(problem(kCluster + std::string("fp32_attention = 0\n")), "");
  EXPECT_EQ(problem(kCluster + std::string("fp32_attention = 1e-300\n")),
            "x.toml:13: efficiency.fp32_attention = 1e-300: must be a number, "
            "0 or from 1e-12 to 1");
}

TEST(Cluster, AnIdleDeviceTakesNoMorePowerThanABusyOne) {
  const auto with = [](const std::string& lines) {
    return problem(replaced(kCluster, "[node]", lines + "\n[node]"));
  };
  EXPECT_EQ(with("busy_w = 50\nidle_w = 300"),
            "x.toml: device.idle_w = 300: must be at most device.busy_w = 50");
  EXPECT_EQ(with("busy_w = 300\nidle_w = 300"), "");
  EXPECT_EQ(with("idle_w = 300"), "") << "the power under load is unknown";
}

TEST(Cluster, AMissingKeyIsNamed) {
  EXPECT_EQ(
      problem(replaced(kCluster, "peak_tflops = 300", "")),
      "x.toml: device.peak_tflops: is required: give a number from 1e-12 to "
      "1000000");
}

TEST(Model, ErrorsNameTheValueAndWhatIsAllowed) {
  pb::ModelFile file;
  ASSERT_OK(
      read("[model]\ndim = 100\nn_layers = 2\nn_heads = 3\n"
           "hidden_dim = 8\nvocab_size = 9\n",
           &file));
  EXPECT_EQ(model_of(file).status().message(),
            "model.n_heads = 3: must divide model.dim = 100");
  EXPECT_EQ(read("[model]\nn_layers = 1025\n", &file).message(),
            "x.toml:2: model.n_layers = 1025: must be an integer from 1 to "
            "1024");
  EXPECT_EQ(
      read("[model]\narch = \"mamba\"\n", &file).message().substr(0, 74),
      "x.toml:2: model.arch = \"mamba\": must be one of \"llama\", \"gpt\"");
}

TEST(Descriptions, EveryShippedClusterIsValid) {
  int n = 0;
  for (const auto& entry : fs::directory_iterator("deploy/clusters")) {
    pb::Cluster c;
    EXPECT_OK(jobfile::load_description(entry.path().string(), &c));
    // Written and read again it is the same.
    pb::Cluster again;
    ASSERT_OK(read(jobfile::description_text(c), &again));
    EXPECT_EQ(c.SerializeAsString(), again.SerializeAsString());
    EXPECT_GT(c.efficiency().error(), 0) << entry.path();
    // Tensor cores of before 2020 know no fp32, AMD's not at half of the rate.
    const std::string& name = c.device().name();
    EXPECT_EQ(c.device().peak_fp32_tflops() > 0,
              name == "V100" || name.starts_with("MI"));
    ++n;
  }
  EXPECT_GE(n, 10);
}

// Bus bandwidths by NCCL's tests, which NVLink SHARP decides: eight H200; four
// nodes of eight H100 (arXiv 2411.13055).
TEST(Descriptions, AllReducesTakeWhatWasMeasured) {
  constexpr double kMi = 1 << 20, kGiga = 1e9;
  const struct {
    const char* cluster;
    int devices;
    double bytes, bandwidth;
  } kMeasured[] = {{"h200", 8, kMi, 39.9},        {"h200", 8, 64 * kMi, 346.5},
                   {"h200", 8, 512 * kMi, 450},   {"h200", 8, 16384 * kMi, 482},
                   {"h100", 32, kMi, 15},         {"h100", 32, 512 * kMi, 317},
                   {"h100", 32, 16384 * kMi, 357}};
  for (const auto& k : kMeasured) {
    pb::Cluster c;
    ASSERT_OK(jobfile::load_description(
        "deploy/clusters/" + std::string(k.cluster) + ".toml", &c));
    const double n = k.devices;
    const double seconds =
        all_reduce_s(machine_of(c), {.size = k.devices}, k.bytes);
    EXPECT_NEAR(2 * (n - 1) / n * k.bytes / seconds / kGiga / k.bandwidth, 1,
                0.15)
        << k.cluster << " " << k.devices << " " << k.bytes;
  }
}

TEST(Descriptions, EveryShippedModelHasTheSizeOfItsName) {
  int n = 0;
  for (const auto& entry : fs::directory_iterator("deploy/models")) {
    pb::ModelFile file;
    ASSERT_OK(jobfile::load_description(entry.path().string(), &file));
    ASSERT_OK_AND(const auto model, model_of(file));
    const std::string name = entry.path().stem().string();
    const std::string size = name.substr(name.rfind('-') + 1);
    const double nominal = std::stod(size) * (size.back() == 't' ? 1e12 : 1e9);
    JobShape shape;
    shape.model = model;
    const double elements =
        static_cast<double>(model.n_layers) * layer_elements(shape, {}) +
        vocabulary_elements(shape, {}) * (model.tie_embeddings ? 1 : 2);
    // Names are rounded, the smallest most; Megatron's count one table.
    EXPECT_NEAR(elements / nominal, 1, nominal < 5e9 ? 0.32 : 0.12) << name;
    ++n;
  }
  EXPECT_GE(n, 25);
}

}  // namespace
}  // namespace remesh::planner
