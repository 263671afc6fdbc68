#include "checkpoint/huggingface/config.h"

#include <nlohmann/json.hpp>

#include "tests/testing/expect.h"
#include "tests/unit/huggingface/files.h"

namespace remesh::huggingface {
namespace {

using Json = nlohmann::json;

TEST(Config, BothFormsHaveTheSameMeaning) {
  const auto before = parse_config(kOldConfig, "config.json");
  const auto now = parse_config(kNewConfig, "config.json");
  ASSERT_OK(before);
  ASSERT_OK(now);
  EXPECT_EQ(before->model, now->model);
  const geometry::ModelConfig expected = {.dim = 4096,
                                          .n_layers = 32,
                                          .n_heads = 32,
                                          .n_kv_heads = 8,
                                          .hidden_dim = 14336,
                                          .vocab_size = 128256,
                                          .norm_eps = 1e-5,
                                          .rope_theta = 5e5,
                                          .rope_scaled = true};
  EXPECT_EQ(now->model, expected);
  EXPECT_EQ(now->max_position, 131072);
  EXPECT_EQ(now->bos_token_id, "128000");
  EXPECT_EQ(now->eos_token_id, "[128001,128008,128009]");
}

TEST(Config, MissingKeysHaveTheDefaultsOfTransformers) {
  ASSERT_OK_AND(const auto c,
                parse_config(R"({"model_type": "llama", "hidden_size": 64,
    "intermediate_size": 172, "num_hidden_layers": 5, "vocab_size": 512,
    "num_attention_heads": 8, "rope_scaling": null})",
                             "c"));
  EXPECT_EQ(c.model.n_kv_heads, 8);
  EXPECT_EQ(c.model.norm_eps, 1e-6);
  EXPECT_EQ(c.model.rope_theta, 10000);
  EXPECT_FALSE(c.model.tie_embeddings);
  EXPECT_FALSE(c.model.rope_scaled);
  EXPECT_EQ(c.bos_token_id, "");
}

// It changes no result of the model, only how others train it.
TEST(Config, DropoutIsIgnored) {
  ASSERT_OK_AND(const auto plain, parse_config(kOldConfig, "c"));
  for (const char* key :
       {"attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout"}) {
    Json json = Json::parse(kOldConfig);
    json[key] = 0.1;
    ASSERT_OK_AND(const auto c, parse_config(json.dump(), "c"));
    EXPECT_EQ(c.model, plain.model) << key;
  }
}

// Families have defaults that a small vocabulary does not have.
TEST(Config, TokensAreWrittenEvenIfThereAreNone) {
  auto c = parse_config(kNewConfig, "c");
  c->bos_token_id = c->eos_token_id = "";
  const auto none = Json::parse(config_json(*c, Dtype::kBf16));
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"})
    EXPECT_TRUE(none.contains(key) && none[key].is_null()) << key;
  c->pad_token_id = "7";
  const std::string written = config_json(*c, Dtype::kBf16);
  EXPECT_EQ(Json::parse(written)["pad_token_id"], 7);
  EXPECT_EQ(parse_config(written, "c")->pad_token_id, "7");
}

TEST(Config, WhatIsWrittenIsReadInBothForms) {
  for (const char* text : {kOldConfig, kNewConfig}) {
    auto c = parse_config(text, "c");
    for (const bool scaled : {true, false}) {
      if (!scaled) {
        c->model.rope_scaled = false;
        c->model.rope_scaling = {};
      }
      const std::string written = config_json(*c, Dtype::kBf16);
      Json json = Json::parse(written);
      EXPECT_EQ(json["dtype"], "bfloat16");
      const auto same = [&](const Json& j) {
        ASSERT_OK_AND(const auto read, parse_config(j.dump(), "c"));
        EXPECT_EQ(read.model, c->model);
        EXPECT_EQ(read.max_position, c->max_position);
        EXPECT_EQ(read.eos_token_id, c->eos_token_id);
      };
      same(json);
      Json old = json;
      old.erase("rope_parameters");
      same(old);
      json.erase("rope_theta");
      json.erase("rope_scaling");
      same(json);
    }
  }
}

TEST(Config, ReadsMistral) {
  Json json = Json::parse(kOldConfig);
  json["model_type"] = "mistral";
  json["architectures"] = {"MistralForCausalLM"};
  json["rope_scaling"] = nullptr;
  json["sliding_window"] = 4096;
  json["head_dim"] = 160;
  ASSERT_OK_AND(const auto c, parse_config(json.dump(), "c"));
  EXPECT_EQ(c.model.arch, "mistral");
  EXPECT_EQ(c.model.sliding_window, 4096);
  EXPECT_EQ(c.model.head_dim(), 160);
  EXPECT_EQ(c.model.q_dim(), 5120);
  EXPECT_EQ(parse_config(config_json(c, Dtype::kBf16), "c")->model, c.model);
  json["sliding_window"] = nullptr;
  ASSERT_OK_AND(const auto full, parse_config(json.dump(), "c"));
  EXPECT_EQ(full.model.sliding_window, 0);
  EXPECT_EQ(parse_config(config_json(full, Dtype::kBf16), "c")->model,
            full.model);
  json.erase("sliding_window");
  EXPECT_EQ(parse_config(json.dump(), "c")->model.sliding_window, 4096);
}

TEST(Config, ReadsQwen) {
  Json json = Json::parse(kOldConfig);
  json["rope_scaling"] = nullptr;
  const std::pair<const char*, const char*> families[] = {
      {"qwen2", "Qwen2ForCausalLM"}, {"qwen3", "Qwen3ForCausalLM"}};
  for (const auto& [type, architecture] : families) {
    json["model_type"] = type;
    json["architectures"] = {architecture};
    json["hidden_size"] = 2048;
    ASSERT_OK_AND(const auto c, parse_config(json.dump(), "c"));
    EXPECT_EQ(c.model.arch, type);
    // Qwen 3's head is 128 wide unless the file says otherwise.
    EXPECT_EQ(c.model.head_dim(), c.model.arch == "qwen3" ? 128 : 64);
    EXPECT_EQ(parse_config(config_json(c, Dtype::kBf16), "c")->model, c.model);
  }
}

TEST(Config, Phi3HasNoScalingOfLlama) {
  Json json = Json::parse(kOldConfig);
  json["model_type"] = "phi3";
  json["architectures"] = {"Phi3ForCausalLM"};
  const auto refused = [](const Json& j) {
    return parse_config(j.dump(), "c").status().message();
  };
  EXPECT_HAS(
      refused(json),
      "rope_scaling: rope_type = \"llama3\": must be default in a phi3 model");
  for (const char* type : {"longrope", "su", "yarn"}) {
    json["rope_scaling"] = {{"type", type}};
    EXPECT_HAS(refused(json), "must be default");
  }
  // Beside rope_parameters it counts, too.
  json["rope_scaling"] = Json::parse(kOldConfig)["rope_scaling"];
  json["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5e5}};
  EXPECT_HAS(refused(json), "rope_scaling: rope_type = \"llama3\"");
  json.erase("rope_parameters");
  json["rope_scaling"] = nullptr;
  EXPECT_EQ(refused(json), "");
}

TEST(Config, RefusesByNameWhatItCannotCompute) {
  const struct {
    const char* key;
    Json value;
    const char* message;
  } cases[] = {
      {"model_type", "gpt2", "model_type = \"gpt2\": must be one of llama,"},
      {"model_type", nullptr, "model_type = null"},
      {"architectures", {"LlamaForSequenceClassification"}, "architectures"},
      {"hidden_act", "gelu", "hidden_act = \"gelu\": must be \"silu\""},
      {"attention_bias", true, "attention_bias = true: must be false"},
      {"mlp_bias", true, "mlp_bias = true: must be false"},
      {"quantization_config", {{"bits", 4}}, "quantization_config"},
      {"use_sliding_window", true, "use_sliding_window = true"},
      {"layer_types", {"full_attention", "sliding_attention"}, "layer_types"},
      {"rope_scaling", {{"type", "linear"}, {"factor", 2}}, "\"linear\""},
      {"rope_scaling", {{"rope_type", "yarn"}}, "rope_type = \"yarn\""},
      {"rope_scaling", {{"rope_type", "llama3"}}, "factor is missing"},
      {"rope_scaling", "none", "rope_scaling = \"none\": must be an object"},
      {"rope_parameters",
       {{"full_attention", {{"rope_type", "default"}, {"rope_theta", 1e6}}}},
       "must be the same in all layers"},
      {"rope_parameters",
       {{"rope_type", "default"}, {"partial_rotary_factor", 0.5}},
       "partial_rotary_factor = 0.5"},
      {"rope_parameters",
       {{"rope_type", "default"}, {"rope_theta", 1e4}},
       "rope_theta = 500000.0: must be that of rope_parameters, 10000"},
      {"rope_parameters",
       {{"rope_type", "default"}, {"rope_theta", 5e5}},
       "rope_scaling = "},
      {"head_dim", 63, "model.head_dim = 63: rotary"},
      {"hidden_size", 4097, "must divide"},
      {"hidden_size", "4096", "hidden_size = \"4096\": must be an integer"},
      {"hidden_size", 4e3, "hidden_size = 4000.0: must be an integer"},
      {"vocab_size", nullptr, "vocab_size is missing"},
      {"num_hidden_layers", -1, "num_hidden_layers = -1"},
      {"rms_norm_eps", 1e-46, "norm_eps"},
      {"tie_word_embeddings", 1, "tie_word_embeddings = 1"},
      {"eos_token_id", "</s>", "eos_token_id"}};
  for (const auto& c : cases) {
    Json json = Json::parse(kOldConfig);
    json[c.key] = c.value;
    const auto read = parse_config(json.dump(), "config.json");
    ASSERT_FALSE(read.ok()) << c.key << " " << c.value;
    EXPECT_SAYS(read, c.message);
  }
  EXPECT_EQ(parse_config("[]", "c").status().code(), Code::kCorrupt);
  EXPECT_EQ(parse_config("{", "c").status().message().find("c: parse error"),
            0);
  EXPECT_EQ(parse_config(R"({"a":1,"a":2})", "c").status().code(),
            Code::kCorrupt);
}

}  // namespace
}  // namespace remesh::huggingface
