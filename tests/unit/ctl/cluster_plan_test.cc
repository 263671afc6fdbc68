#include "coordinator/ctl/cluster_plan.h"

#include <nlohmann/json.hpp>

#include "checkpoint/huggingface/config.h"
#include "parallel/geometry/param_table.h"
#include "tests/testing/expect.h"

namespace remesh::ctl {
namespace {

using Json = nlohmann::json;

constexpr char kLlama[] = R"({"model_type": "llama", "hidden_size": 4096,
  "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
  "intermediate_size": 14336, "vocab_size": 128256,
  "max_position_embeddings": 131072, "rope_scaling": null})";

std::string without(const std::string& key) {
  Json json = Json::parse(kLlama);
  json.erase(key);
  return json.dump();
}
std::string with(const std::string& key, const Json& value) {
  Json json = Json::parse(kLlama);
  json[key] = value;
  return json.dump();
}
std::string problem(const std::string& json) {
  return parse_hf_config(json, "config.json").status().message();
}

TEST(HfConfig, ALlamaIsThatOfTheDescription) {
  const ModelChoice hf = parse_hf_config(kLlama, "config.json").value();
  const ModelChoice ours =
      find_model("deploy/models/llama3-8b.toml", {}).value();
  EXPECT_EQ(hf.model, ours.model);
  EXPECT_EQ(hf.seq_len, 8192);
}

TEST(HfConfig, Gpt2HasOtherNamesAndDefaults) {
  const ModelChoice m =
      parse_hf_config(R"({"model_type": "gpt2", "n_embd": 768, "n_layer": 12,
        "n_head": 12, "n_inner": null, "vocab_size": 50257,
        "n_positions": 1024})",
                      "c")
          .value();
  EXPECT_EQ(m.model.arch, "gpt");
  EXPECT_EQ(m.model.hidden_dim, 3072);
  EXPECT_EQ(m.model.n_kv_heads, 12);
  EXPECT_TRUE(m.model.tie_embeddings);
  EXPECT_EQ(m.seq_len, 1024);
}

// Gemma 7B, Falcon 7B and 40B, BLOOM, MPT 7B and GPT-J as their files have
// them; the elements of the matrices are counted by hand.
TEST(HfConfig, OtherDenseDecodersHaveTheirSizes) {
  const struct {
    const char* json;
    double layers, layer, tables;
  } kCases[] = {
      {R"({"model_type": "gemma", "hidden_size": 3072, "head_dim": 256,
        "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 24576,
        "vocab_size": 256000, "max_position_embeddings": 8192})",
       28, 3072.0 * (4 * 4096 + 3 * 24576), 256000.0 * 3072},
      {R"({"model_type": "falcon", "hidden_size": 4544,
        "num_hidden_layers": 32, "num_attention_heads": 71,
        "num_kv_heads": 71, "multi_query": true,
        "new_decoder_architecture": false, "vocab_size": 65024})",
       32, 4544.0 * (10 * 4544 + 2 * 64), 65024.0 * 4544},
      {R"({"model_type": "falcon", "hidden_size": 8192,
        "num_hidden_layers": 60, "num_attention_heads": 128,
        "num_kv_heads": 8, "multi_query": true,
        "new_decoder_architecture": true, "vocab_size": 65024})",
       60, 8192.0 * (10 * 8192 + 2 * 512), 65024.0 * 8192},
      {R"({"model_type": "bloom", "n_embed": 14336, "n_layer": 70,
        "num_attention_heads": 112, "seq_length": 2048,
        "vocab_size": 250880})",
       70, 12.0 * 14336 * 14336, 250880.0 * 14336},
      {R"({"model_type": "mpt", "d_model": 4096, "n_layers": 32,
        "n_heads": 32, "expansion_ratio": 4, "max_seq_len": 2048,
        "vocab_size": 50432})",
       32, 12.0 * 4096 * 4096, 50432.0 * 4096},
      {R"({"model_type": "gptj", "n_embd": 4096, "n_layer": 28,
        "n_head": 16, "n_inner": null, "n_positions": 2048,
        "vocab_size": 50400, "tie_word_embeddings": false})",
       28, 12.0 * 4096 * 4096, 2 * 50400.0 * 4096}};
  for (const auto& c : kCases) {
    ASSERT_OK_AND(const auto m, parse_hf_config(c.json, "c"));
    EXPECT_EQ(static_cast<double>(parameters_of({.model = m.model})),
              c.layers * c.layer + c.tables)
        << c.json;
  }
}

// As in transformers.
TEST(HfConfig, FamiliesHaveTheirOwnDefaults) {
  const auto model = [](const char* type, const char* without) {
    Json json = Json::parse(kLlama);
    json["model_type"] = type;
    json.erase(without);
    return parse_hf_config(json.dump(), "c").value().model;
  };
  for (const char* type : {"gemma", "gemma2", "gemma3_text"})
    EXPECT_EQ(model(type, "").head_dim(), 256) << type;
  EXPECT_EQ(model("cohere", "").head_dim(), 128);
  for (const char* type : {"gpt_bigcode", "falcon"})
    EXPECT_EQ(model(type, "num_key_value_heads").n_kv_heads, 1) << type;
  EXPECT_EQ(model("opt", "num_key_value_heads").n_kv_heads, 32);
}

TEST(HfConfig, ErrorsNameTheKeyAndWhatIsAllowed) {
  EXPECT_EQ(problem("[]"), "config.json: is not a JSON object");
  EXPECT_EQ(problem("{"), "config.json: is not a JSON object");
  EXPECT_EQ(problem(without("hidden_size")),
            "config.json: hidden_size is missing");
  EXPECT_EQ(problem(with("vocab_size", -3)),
            "config.json: vocab_size = -3: must be an integer from 1 to "
            "2147483648");
  EXPECT_EQ(problem(with("hidden_size", uint64_t{1} << 63)),
            "config.json: hidden_size = 9223372036854775808: must be an "
            "integer from 1 to 2147483648");
  EXPECT_EQ(problem(with("num_attention_heads", "many")),
            "config.json: num_attention_heads = \"many\": must be an integer "
            "from 1 to 2147483648");
  EXPECT_EQ(problem(with("head_dim", 129)),
            "config.json: model.head_dim = 129: rotary embedding needs an even "
            "head size, at most 4096");
  EXPECT_TRUE(problem(with("model_type", "mixtral"))
                  .starts_with("config.json: model_type = \"mixtral\": must be "
                               "one of llama, mistral, "));
  EXPECT_HAS(problem(with("num_key_value_heads", 7)), "n_kv_heads = 7");
}

// As Qwen3-0.6B and Mistral Nemo have it, whose sizes these are. Parameters are
// counted by hand.
TEST(HfConfig, AHeadMayHaveAnySize) {
  const std::string qwen = R"({"model_type": "qwen3", "hidden_size": 1024,
    "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "intermediate_size": 3072, "vocab_size": 151936,
    "tie_word_embeddings": true)";
  const auto parameters = [](const ModelChoice& m) {
    return geometry::ParamTable::make(m.model).num_elements();
  };
  // Qwen 3 has heads of 128 where its file does not say.
  for (const char* rest : {"}", R"(, "head_dim": 128})"}) {
    const ModelChoice m = parse_hf_config(qwen + rest, "c").value();
    EXPECT_EQ(m.model.head_dim(), 128);
    EXPECT_EQ(parameters(m), 596'049'920);
  }
  const ModelChoice m = parse_hf_config(qwen + "}", "c").value();
  const ClusterChoice h100 = find_cluster("deploy/clusters/h100.toml").value();
  const Json out =
      Json::parse(cluster_plan({.devices = 1, .json = true}, m, h100).value());
  const double layer = 1024.0 * (2 * 2048 + 2 * 1024 + 3 * 3072);
  const double table = 151936.0 * 1024;
  EXPECT_EQ(out["parameters"], 28 * layer + table);  // of matrices
  EXPECT_TRUE(out["parameters"].is_number_integer());
  const Json& best = out["plans"][0];
  EXPECT_NEAR(best["mfu"].get<double>() * 1e12 *
                  h100.cluster.device().peak_tflops() /
                  best["tokens_per_s_per_device"].get<double>(),
              6 * (28 * (layer + 2048.0 * m.seq_len) + table), 1e3);

  const ModelChoice nemo =
      parse_hf_config(
          R"({"model_type": "mistral", "hidden_size": 5120, "head_dim": 128,
            "num_hidden_layers": 40, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336,
            "vocab_size": 131072, "max_position_embeddings": 1024000})",
          "c")
          .value();
  EXPECT_EQ(parameters(nemo), 12'247'782'400);
}

// transformers takes a default only where the key is absent.
TEST(HfConfig, NullKeyValueHeadsAreAsManyAsHeads) {
  for (const char* type : {"llama", "mistral", "qwen2", "qwen3"}) {
    Json json = Json::parse(kLlama);
    json.update(Json{{"model_type", type}, {"num_key_value_heads", nullptr}});
    EXPECT_EQ(parse_hf_config(json.dump(), "c").value().model.n_kv_heads, 32)
        << type;
  }
}

TEST(HfConfig, WhatIsMissingIsAsInAnImportedModel) {
  for (const char* type : {"llama", "mistral", "qwen2", "qwen3", "phi3"})
    for (const char* key :
         {"sliding_window", "num_key_value_heads", "head_dim"}) {
      Json json = Json::parse(kLlama);
      json.update(Json{{"model_type", type}, {"rms_norm_eps", 1e-5}});
      json.erase(key);
      const ModelChoice planned = parse_hf_config(json.dump(), "c").value();
      ASSERT_OK_AND(const auto imported,
                    huggingface::parse_config(json.dump(), "c"));
      EXPECT_EQ(planned.model, imported.model) << type << " without " << key;
    }
  EXPECT_EQ(parse_hf_config(with("model_type", "mistral"), "c")
                .value()
                .model.sliding_window,
            4096);
}

// A plan does not depend on how they compute.
TEST(HfConfig, ModelsThatCannotBeImportedArePlanned) {
  const auto plain = parse_hf_config(kLlama, "c");
  for (const auto& [key, value] :
       {std::pair<const char*, Json>{"rope_scaling", {{"type", "yarn"}}},
        {"attention_bias", true},
        {"architectures", Json::array({"LlamaForSequenceClassification"})}}) {
    EXPECT_FALSE(huggingface::parse_config(with(key, value), "c").ok()) << key;
    ASSERT_OK_AND(const auto planned, parse_hf_config(with(key, value), "c"));
    EXPECT_EQ(planned.model, plain->model);
  }
}

Result<std::string> plan(const std::string& model, const std::string& cluster,
                         const ClusterPlanOptions& o) {
  const ModelChoice m =
      find_model("deploy/models/" + model + ".toml", {}).value();
  const ClusterChoice c =
      find_cluster("deploy/clusters/" + cluster + ".toml").value();
  return cluster_plan(o, m, c);
}
Json plan_json(const std::string& model, const std::string& cluster,
               int64_t devices, ClusterPlanOptions o = {}) {
  o.json = true;
  o.devices = devices;
  return Json::parse(plan(model, cluster, o).value());
}

TEST(ClusterPlan, KnownCasesHaveSensibleWinners) {
  // A model that fits into a node needs no pipeline.
  const Json small = plan_json("llama3-8b", "h100", 8)["plans"][0];
  EXPECT_EQ(small["mesh"]["pp"], 1);
  EXPECT_GT(small["mfu"], 0.40);
  // Llama 3 405B was trained with TP 8 and PP 16, with 38 to 43 % MFU (arXiv
  // 2407.21783).
  const Json large = plan_json("llama3-405b", "h100", 16384)["plans"][0];
  EXPECT_EQ(large["mesh"]["tp"], 8);
  EXPECT_GE(large["mesh"]["pp"], 8);
  EXPECT_NEAR(large["mfu"], 0.42, 0.06);
  // The Frontier study's trillion parameters: 32 % of the peak, TP in the node.
  const Json trillion = plan_json("frontier-1t", "frontier", 3072)["plans"][0];
  EXPECT_EQ(trillion["mesh"]["tp"], 8);
  EXPECT_GE(trillion["mesh"]["pp"], 16);
}

TEST(ClusterPlan, EveryPlanFitsAndUsesAllDevices) {
  const Json out = plan_json("llama3-70b", "h100", 64);
  EXPECT_EQ(out["plans"].size(), 10u);
  double last = 0;
  for (const Json& p : out["plans"]) {
    const Json& m = p["mesh"];
    EXPECT_EQ(m["dp"].get<int>() * m["pp"].get<int>() * m["tp"].get<int>() *
                  m["cp"].get<int>(),
              64);
    EXPECT_LE(p["memory"]["total"].get<double>(),
              out["usable_memory"].get<double>());
    EXPECT_GE(p["step_s"].get<double>(), last);
    last = p["step_s"];
    double terms = 0;
    for (const Json& t : p["terms_s"]) terms += t.get<double>();
    EXPECT_NEAR(terms, last, 1e-9);
  }
}

TEST(ClusterPlan, MicroBatchesDivideTheDefaultBatch) {
  EXPECT_EQ(default_batch(8192, 8), 512);
  EXPECT_EQ(default_batch(1000, 8), 4096);
  EXPECT_EQ(default_batch(int64_t{1} << 30, 8), 1);
}

// By efficiency.error of the cluster.
TEST(ClusterPlan, AStepHasARangeLearntFromMeasuredRuns) {
  const ModelChoice model =
      find_model("deploy/models/llama3-8b.toml", {}).value();
  ClusterChoice h100 = find_cluster("deploy/clusters/h100.toml").value();
  const auto step = [&](double error) {
    h100.cluster.mutable_efficiency()->set_error(error);
    const ClusterPlanOptions o{.devices = 8, .json = true};
    return Json::parse(cluster_plan(o, model, h100).value())["plans"][0];
  };
  const Json known = step(0.25);
  const double step_s = known["step_s"];
  EXPECT_DOUBLE_EQ(known["step_range_s"][0], 0.75 * step_s);
  EXPECT_DOUBLE_EQ(known["step_range_s"][1], 1.25 * step_s);
  EXPECT_TRUE(step(0)["step_range_s"].is_null());
}

TEST(ClusterPlan, TextSaysWhatLimitsTheBestAndWhatChangesCost) {
  const std::string text = plan("llama3-70b", "h100", {.devices = 64}).value();
  for (const char* part :
       {"70.6B parameters, on 64 x H100 (8 nodes of 8)",
        "best: ", "range: ", "largest loss: ", "usable",
        "with one setting changed:", "slower", "does not fit: "})
    EXPECT_HAS(text, part);
}

TEST(ClusterPlan, JsonHasTheReasonsOfTheText) {
  const Json out = plan_json("llama3-70b", "h100", 64);
  EXPECT_HAS(plan("llama3-70b", "h100", {.devices = 64}).value(),
             "largest loss: " + out["largest_loss"].get<std::string>());
  size_t fitting = 0;
  for (const Json& c : out["changes"]) {
    EXPECT_EQ(c["fits"], c["memory"] <= out["usable_memory"]) << c;
    if (!c["fits"]) continue;
    ++fitting;
    EXPECT_GE(c["step_s"], out["plans"][0]["step_s"]) << c;
  }
  EXPECT_GE(fitting, 2U);
}

// Only where the search leaves them out.
TEST(ClusterPlan, AChangeThatNeedsAnOptionNamesIt) {
  ClusterPlanOptions o{.devices = 64};
  o.limits.degrees = {.dp = 4, .tp = 8, .pp = 2, .cp = 1};
  EXPECT_HAS(plan("llama3-70b", "h100", o).value(),
             "  dp2,pp2,tp16 --tp-across-nodes ");
  o.limits.tensor_across_nodes = true;
  EXPECT_LACKS(plan("llama3-70b", "h100", o).value(), "--tp-across-nodes");
}

TEST(ClusterPlan, SmallModelsHaveMillionsOfParameters) {
  const ModelChoice gpt2 =
      parse_hf_config(R"({"model_type": "gpt2", "n_embd": 768, "n_layer": 12,
        "n_head": 12, "vocab_size": 50257, "n_positions": 1024})",
                      "gpt2")
          .value();
  const ClusterChoice h100 = find_cluster("deploy/clusters/h100.toml").value();
  EXPECT_HAS(cluster_plan({.devices = 1}, gpt2, h100).value(),
             "gpt2: 124M parameters");
}

TEST(ClusterPlan, TheLargestLossNamesTheLinkThatIsUsed) {
  const ModelChoice model =
      find_model("deploy/models/llama3-8b.toml", {}).value();
  ClusterChoice slow = find_cluster("deploy/clusters/h100.toml").value();
  slow.cluster.mutable_node()->set_gb_per_s(1);
  // Data-parallel ranks are neighbors, stages may be in different nodes.
  ClusterPlanOptions o{.devices = 16, .global_batch = 16};
  o.limits.degrees = {.dp = 8, .tp = 1, .pp = 2, .cp = 1};
  EXPECT_HAS(cluster_plan(o, model, slow).value(),
             "largest loss: the links inside the node (data parallelism)");
  EXPECT_HAS(plan("llama3-1b", "h100", {.devices = 1}).value(),
             "largest loss: none above 0.5 % of the step");
}

// 12 microbatches are no rounds of 8.
TEST(ClusterPlan, AChangeIsAPlanOfTheSearch) {
  ClusterPlanOptions o{.devices = 64, .global_batch = 12};
  o.limits.degrees = {.dp = 1, .tp = 8, .pp = 8, .cp = 1};
  const auto interleaved = [&] {
    return plan("llama3-70b", "h100", o).value().find("interleaved") !=
           std::string::npos;
  };
  EXPECT_FALSE(interleaved());
  o.global_batch = 16;
  EXPECT_TRUE(interleaved());
}

TEST(ClusterPlan, ComparesTwoMeshesByCause) {
  const std::string text =
      plan("llama3-8b", "h100", {.devices = 8, .compare = {"dp8", "dp4,tp2"}})
          .value();
  EXPECT_HAS(text, "difference");
  EXPECT_HAS(text, "tensor-parallel communication    0.000 s");
}

// 8.03e9 elements at 16 bytes, and ZeRO shards all but the activations.
TEST(ClusterPlan, AMeshThatDoesNotFitIsExplained) {
  ClusterPlanOptions o{.devices = 8, .compare = {"dp8", "tp2, dp4"}};
  o.limits.zero_stage = 0;
  const std::string text = plan("llama3-8b", "h100", o).value();
  EXPECT_HAS(text, "dp8 ZeRO 0, micro-batch 1, recompute full\n");
  EXPECT_HAS(text, " GB of 72.0 GB usable\n");
  EXPECT_HAS(text, "\n  memory");
  const Json out = plan_json("llama3-8b", "h100", 8, o);
  EXPECT_EQ(out["plans"][0]["fits"], false);
  EXPECT_GT(out["plans"][0]["memory"]["total"], 16 * 8.03e9);
  EXPECT_EQ(out["plans"][1]["mesh"]["tp"], 2);
  EXPECT_EQ(out["plans"][1]["fits"],
            out["plans"][1]["memory"]["total"] <= out["usable_memory"]);
}

TEST(ClusterPlan, ErrorsNameTheValueAndWhatIsAllowed) {
  const auto error = [](const std::string& model, const std::string& cluster,
                        const ClusterPlanOptions& o) {
    return plan(model, cluster, o).status().message();
  };
  EXPECT_EQ(error("llama3-8b", "h100", {.devices = 8, .explain = "dp4"}),
            "dp4: has 4 devices instead of 8");
  EXPECT_EQ(error("llama3-8b", "a100-80", {.devices = 8, .fp8 = true}),
            "--fp8: the A100 has no fp8");
  EXPECT_HAS(error("llama3-405b", "v100", {.devices = 8}),
             "the model fits into no mesh of 8 devices");
}

}  // namespace
}  // namespace remesh::ctl
