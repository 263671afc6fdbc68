#include "checkpoint/huggingface/config.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "checkpoint/huggingface/json.h"
#include "proto/base/json_reader.h"
#include "proto/base/text.h"

namespace remesh::huggingface {
namespace {

using geometry::ModelConfig;

struct Family {
  const char* model_type;  // also ModelConfig::arch
  const char* architecture;
  int64_t kv_heads =
      0;  // where config.json has no such key; 0: as many as heads
};
constexpr Family kFamilies[] = {{"llama", "LlamaForCausalLM"},
                                {"mistral", "MistralForCausalLM", 8},
                                {"qwen2", "Qwen2ForCausalLM", 32},
                                {"qwen3", "Qwen3ForCausalLM", 32},
                                {"phi3", "Phi3ForCausalLM"}};

// Where config.json does not say.
constexpr int64_t kQwen3HeadDim = 128;
constexpr int64_t kMistralWindow = 4096;

Family read_family(JsonReader& r) {
  std::vector<std::string> types;
  const std::string type = r.text("model_type", "");
  for (const Family& f : kFamilies) {
    if (type == f.model_type) return f;
    types.emplace_back(f.model_type);
  }
  r.refuse("model_type", "one of " + join(types));
  return {.model_type = "", .architecture = ""};
}

Config read_shape(const Family& family, const Json& json, JsonReader& r) {
  Config c;
  ModelConfig& m = c.model;
  m.arch = family.model_type;
  m.dim = r.integer("hidden_size", 0);
  m.n_layers = r.integer("num_hidden_layers", 0);
  m.n_heads = r.integer("num_attention_heads", 0);
  // null: as many as heads.
  const bool family_decides =
      family.kv_heads > 0 && !json.contains("num_key_value_heads");
  m.n_kv_heads = r.integer("num_key_value_heads",
                           family_decides ? family.kv_heads : m.n_heads);
  m.hidden_dim = r.integer("intermediate_size", 0);
  m.vocab_size = r.integer("vocab_size", 0);
  m.tie_embeddings = r.flag("tie_word_embeddings", false);
  if (m.arch == "qwen3" || r.find("head_dim") != nullptr)
    m.set_head_dim(r.integer("head_dim", kQwen3HeadDim));
  if (geometry::has_window(m.arch) && r.find("sliding_window") != nullptr)
    m.sliding_window = r.integer("sliding_window", 0);
  else if (m.arch == "mistral" && !json.contains("sliding_window"))
    m.sliding_window = kMistralWindow;
  c.max_position = r.integer("max_position_embeddings", c.max_position);
  return c;
}

void read_rope_scaling(JsonReader& r, ModelConfig& m) {
  const std::string type =
      r.text("rope_type", r.text("type", "default").c_str());
  if (r.number("partial_rotary_factor", 1) != 1)
    r.refuse("partial_rotary_factor", "1");
  if (type == "default") return;
  // transformers scales Phi-3 by longrope alone.
  const bool phi3 = m.arch == "phi3";
  if (type != "llama3" || phi3) {
    r.refuse(r.find("rope_type") != nullptr ? "rope_type" : "type",
             phi3 ? "default in a phi3 model" : "one of default, llama3");
    return;
  }
  m.rope_scaled = true;
  m.rope_scaling = {.factor = r.number("factor", 0),
                    .low_freq_factor = r.number("low_freq_factor", 0),
                    .high_freq_factor = r.number("high_freq_factor", 0),
                    .original_max_position =
                        r.integer("original_max_position_embeddings", 0)};
}

// rope_theta and rope_scaling, or rope_parameters, which replaced them.
void read_rope(JsonReader& r, ModelConfig& m) {
  const Json* const now = r.find("rope_parameters");
  const Json* const before = r.find("rope_scaling");
  m.rope_theta = r.number("rope_theta", 10000);
  if (r.number("partial_rotary_factor", 1) != 1)
    r.refuse("partial_rotary_factor", "1");
  const char* const key = now != nullptr ? "rope_parameters" : "rope_scaling";
  const Json* const rope = now != nullptr ? now : before;
  if (rope == nullptr) return;
  if (!rope->is_object()) return r.refuse(key, "an object");
  // By kinds of layers.
  for (const Json& value : *rope)
    if (value.is_object()) return r.refuse(key, "the same in all layers");
  JsonReader inner(*rope, r.name() + ": " + key);
  m.rope_theta = inner.number("rope_theta", m.rope_theta);
  read_rope_scaling(inner, m);
  if (!inner.problem().ok()) return r.fail_as(inner);
  if (r.find("rope_theta") != nullptr &&
      r.number("rope_theta", 1) != m.rope_theta)
    return r.refuse("rope_theta",
                    fmt::format("that of {}, {}", key, m.rope_theta));
  // transformers takes rope_scaling then, versions before 5 know no other.
  if (now != nullptr && before != nullptr && now->is_object() &&
      before->is_object()) {
    JsonReader older(*before, r.name() + ": rope_scaling");
    ModelConfig scaled = {.arch = m.arch};
    read_rope_scaling(older, scaled);
    if (!older.problem().ok()) return r.fail_as(older);
    if (scaled.rope_scaled != m.rope_scaled ||
        !(scaled.rope_scaling == m.rope_scaling))
      return r.refuse("rope_scaling", "the scaling in rope_parameters");
  }
}

// An integer or a list of integers, as JSON; "" when absent.
std::string token_id(JsonReader& r, const char* key) {
  const Json* const v = r.find(key);
  if (v == nullptr) return "";
  bool good = v->is_number_integer() || v->is_array();
  if (v->is_array())
    for (const Json& id : *v) good = good && id.is_number_integer();
  if (!good) r.refuse(key, "an integer or a list of integers");
  return v->dump();
}

// What the families here do not have.
void refuse_others(JsonReader& r) {
  if (r.text("hidden_act", "silu") != "silu")
    r.refuse("hidden_act", "\"silu\"");
  for (const char* key : {"attention_bias", "mlp_bias"})
    if (r.flag(key, false)) r.refuse(key, "false");
  if (r.flag("use_sliding_window", false))
    r.refuse("use_sliding_window", "false");
  if (const Json* const types = r.find("layer_types"))
    for (const Json& type : *types)
      if (type != "full_attention")
        return r.refuse("layer_types", "\"full_attention\" in each layer");
  if (r.find("quantization_config") != nullptr)
    r.refuse("quantization_config", "absent: weights in fp32, bf16 or fp16");
}

Result<Config> checked(Config c, const JsonReader& r) {
  RETURN_IF_ERROR(r.problem());
  if (const Status valid = c.model.validate(); !valid.ok())
    return valid.with_context(r.name());
  return c;
}

}  // namespace

Result<Config> parse_shape(std::string_view text, const std::string& name) {
  ASSIGN_OR_RETURN(const Json json, parse_json(text, name));
  JsonReader r(json, name);
  return checked(read_shape(read_family(r), json, r), r);
}

Result<Config> parse_config(std::string_view text, const std::string& name) {
  ASSIGN_OR_RETURN(const Json json, parse_json(text, name));
  JsonReader r(json, name);
  const Family family = read_family(r);
  const Json* const names = r.find("architectures");
  if (names != nullptr && *names != Json::array({family.architecture}))
    r.refuse("architectures", fmt::format("[\"{}\"]", family.architecture));
  Config c = read_shape(family, json, r);
  ModelConfig& m = c.model;
  m.norm_eps = r.number("rms_norm_eps", m.arch == "phi3" ? 1e-5 : 1e-6);
  read_rope(r, m);
  refuse_others(r);
  c.bos_token_id = token_id(r, "bos_token_id");
  c.eos_token_id = token_id(r, "eos_token_id");
  c.pad_token_id = token_id(r, "pad_token_id");
  return checked(std::move(c), r);
}

std::vector<std::pair<const char*, std::string>> token_ids(
    const Config& config) {
  return {{"bos_token_id", config.bos_token_id},
          {"eos_token_id", config.eos_token_id},
          {"pad_token_id", config.pad_token_id}};
}

std::string config_json(const Config& config, Dtype dtype) {
  const ModelConfig& m = config.model;
  nlohmann::ordered_json scaling;
  nlohmann::ordered_json rope = {{"rope_type", "default"},
                                 {"rope_theta", m.rope_theta}};
  if (m.rope_scaled) {
    const geometry::RopeScaling& s = m.rope_scaling;
    scaling = {{"rope_type", "llama3"},
               {"factor", s.factor},
               {"low_freq_factor", s.low_freq_factor},
               {"high_freq_factor", s.high_freq_factor},
               {"original_max_position_embeddings", s.original_max_position}};
    rope.update(scaling);
  }
  nlohmann::ordered_json json;
  for (const auto& f : kFamilies)
    if (m.arch == f.model_type)
      json["architectures"] = nlohmann::ordered_json::array({f.architecture});
  json["model_type"] = m.arch;
  json["hidden_size"] = m.dim;
  json["intermediate_size"] = m.hidden_dim;
  json["num_hidden_layers"] = m.n_layers;
  json["num_attention_heads"] = m.n_heads;
  json["num_key_value_heads"] = m.n_kv_heads;
  json["head_dim"] = m.head_dim();
  json["vocab_size"] = m.vocab_size;
  json["max_position_embeddings"] = config.max_position;
  // Converters of other programs ask for it.
  if (m.arch == "phi3")
    json["original_max_position_embeddings"] = config.max_position;
  json["rms_norm_eps"] = m.norm_eps;
  json["tie_word_embeddings"] = m.tie_embeddings;
  json["hidden_act"] = "silu";
  if (m.arch == "llama" || m.arch == "qwen3") json["attention_bias"] = false;
  if (m.arch == "llama") json["mlp_bias"] = false;
  if (geometry::has_window(m.arch))
    json["sliding_window"] = m.sliding_window > 0
                                 ? nlohmann::ordered_json(m.sliding_window)
                                 : nlohmann::ordered_json();
  json["initializer_range"] = 0.02;
  json["rope_theta"] = m.rope_theta;
  json["rope_scaling"] = scaling;
  json["rope_parameters"] = rope;
  // Without them families have defaults, which need not be in the vocabulary.
  for (const auto& [key, ids] : token_ids(config))
    json[key] = ids.empty() ? nlohmann::ordered_json()
                            : nlohmann::ordered_json::parse(ids);
  json["torch_dtype"] = config_name(dtype);
  json["dtype"] = config_name(dtype);
  return json.dump(2) + "\n";
}

}  // namespace remesh::huggingface
