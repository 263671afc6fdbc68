#include "checkpoint/huggingface/other_formats.h"

#include <nlohmann/json.hpp>
#include <tuple>

#include "checkpoint/huggingface/model_folder.h"
#include "tests/testing/expect.h"
#include "tests/unit/huggingface/small_folder.h"

namespace remesh::huggingface {
namespace {

// llama2.c has this one alone.
geometry::ModelConfig small_model_with(bool tied) {
  geometry::ModelConfig m = small_model();
  m.tie_embeddings = tied;
  return m;
}

// The bytes of a parameter as other programs store it: rows of queries and keys
// go (x0, y0, x1, y1, ...) where Hugging Face has (x0, x1, ..., y0, y1, ...).
std::string stored(const SmallFolder& f, const std::string& name) {
  const auto p = static_cast<size_t>(f.table.find(name));
  const geometry::ParamSpec& spec = f.table[p];
  if (spec.role != geometry::Role::kQuery && spec.role != geometry::Role::kKey)
    return f.tensors[p];
  const size_t row = f.tensors[p].size() / static_cast<size_t>(spec.shape[0]);
  const auto half = static_cast<size_t>(f.table.config().head_dim() / 2);
  std::string out;
  for (size_t head = 0; out.size() < f.tensors[p].size(); head += 2 * half)
    for (size_t i = 0; i < half; ++i)
      for (const size_t r : {head + i, head + half + i})
        out += f.tensors[p].substr(r * row, row);
  return out;
}

std::string of_layers(const SmallFolder& f, const std::string& name) {
  std::string out;
  for (int64_t l = 0; l < f.table.config().n_layers; ++l)
    out +=
        stored(f, "model.layers." + std::to_string(l) + "." + name + ".weight");
  return out;
}

std::string integers(const std::vector<int32_t>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * 4};
}

std::string llama2c(const SmallFolder& f, int version) {
  const geometry::ModelConfig& m = f.table.config();
  const auto n = [](int64_t v) { return static_cast<int32_t>(v); };
  const int32_t seq = 5;
  const int32_t sign = version == 0 && !m.tie_embeddings ? -1 : 1;
  std::string head =
      integers({n(m.dim), n(m.hidden_dim), n(m.n_layers), n(m.n_heads),
                n(m.n_kv_heads), n(m.vocab_size) * sign, seq});
  std::string matrices, rest;
  for (const char* name : {"self_attn.q_proj", "self_attn.k_proj",
                           "self_attn.v_proj", "self_attn.o_proj"})
    matrices += of_layers(f, name);
  for (const char* name : {"mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"})
    rest += of_layers(f, name);
  const std::string embedding = stored(f, "model.embed_tokens.weight");
  const std::string norm = stored(f, "model.norm.weight");
  const std::string norm1 = of_layers(f, "input_layernorm");
  const std::string norm2 = of_layers(f, "post_attention_layernorm");
  const std::string last = m.tie_embeddings ? "" : stored(f, "lm_head.weight");
  if (version == 0) {
    const std::string rotary(static_cast<size_t>(seq * m.head_dim()) * 4, 'r');
    return head + embedding + norm1 + matrices + norm2 + rest + norm + rotary +
           last;
  }
  head = "24ka" + integers({version}) + head + (m.tie_embeddings ? "\1" : "");
  head.resize(256, '\0');
  return head + norm1 + norm2 + norm + embedding + matrices + rest + last;
}

TEST(OtherFormats, ReadsBothVersionsOfLlama2c) {
  for (const bool tied : {false, true})
    for (const int version : {0, 1}) {
      const SmallFolder f(Dtype::kFp32, small_model_with(tied));
      const std::string whole = llama2c(f, version);
      f.put("model.bin", whole);
      const std::string path = f.path() + "/model.bin";
      expect_same(f, path);
      ASSERT_OK_AND(const auto model,
                    ModelFolder::open(*posix_file_system(), path));
      EXPECT_EQ(model.config().model, small_model_with(tied));
      EXPECT_EQ(model.config().max_position, 5);
      EXPECT_EQ(model.config().bos_token_id, "1");
      EXPECT_EQ(model.config().eos_token_id, "1");
      for (const std::string& damaged : {whole.substr(0, whole.size() - 4),
                                         whole + "more", whole.substr(0, 20)})
        EXPECT_EQ(parse_llama2c(std::as_bytes(std::span(damaged)), "m")
                      .status()
                      .code(),
                  Code::kCorrupt);
    }
}

TEST(OtherFormats, RefusesQuantizedFilesOfLlama2c) {
  const SmallFolder f(Dtype::kFp32);
  const std::string file = llama2c(f, 2);
  EXPECT_SAYS(parse_llama2c(std::as_bytes(std::span(file)), "m.bin"),
              "version 2");
  const std::string zeros(1000, '\0');
  EXPECT_SAYS(parse_llama2c(std::as_bytes(std::span(zeros)), "m.bin"),
              "not a file of llama2.c");
}

TEST(OtherFormats, ParamsMeanWhatTheySayOrAreRefusedByName) {
  // Only what extents are taken from.
  const auto matrix = [](int64_t rows) {
    return Tensor{.dtype = Dtype::kFp32, .shape = {rows, 8}};
  };
  const Tensors tensors = {{"layers.0.feed_forward.w1.weight", matrix(12)},
                           {"tok_embeddings.weight", matrix(11)},
                           {"output.weight", matrix(11)}};
  const auto read = [&](const char* key, const nlohmann::json& value) {
    nlohmann::json params = {{"dim", 8},         {"n_layers", 2},
                             {"n_heads", 4},     {"n_kv_heads", 2},
                             {"norm_eps", 1e-5}, {"use_scaled_rope", true}};
    params[key] = value;
    return parse_consolidated(params.dump(), tensors, "params.json");
  };
  const auto model = [&](const char* key, const nlohmann::json& value) {
    const auto made = read(key, value);
    EXPECT_OK(made);
    return made.ok() ? made->config.model : geometry::ModelConfig();
  };
  for (const char* key : {"sliding_window", "_sliding_window"}) {
    EXPECT_EQ(model(key, 64).arch, "mistral");
    EXPECT_EQ(model(key, 64).sliding_window, 64);
    EXPECT_EQ(model(key, nullptr).arch, "llama");
  }
  EXPECT_EQ(model("rope_high_freq_factor", 3).rope_scaling.high_freq_factor, 3);
  EXPECT_EQ(model("rope_scaling_factor", 32).rope_scaling.factor, 32);
  EXPECT_TRUE(model("tied_embeddings", true).tie_embeddings);
  EXPECT_FALSE(model("tied_embeddings", false).tie_embeddings);
  const geometry::ModelConfig plain = model("vocab_size", -1);
  for (const auto& [key, value] :
       std::vector<std::pair<const char*, nlohmann::json>>{
           {"ffn_dim_multiplier", 1.3},
           {"multiple_of", 256},
           {"hidden_dim", 12},
           {"max_seq_len", 4096},
           {"model_type", "transformer"},
           {"causal", true},
           {"use_qk_norm", false},
           {"moe", nullptr}})
    EXPECT_EQ(model(key, value), plain) << key;
  for (const auto& [key, value, why] :
       std::vector<std::tuple<const char*, nlohmann::json, const char*>>{
           {"yarn", {{"factor", 16}}, "yarn = {\"factor\":16}: must be absent"},
           {"llama_4_scaling", {{"beta", 0.1}}, "llama_4_scaling = "},
           {"moe", {{"num_experts", 8}}, "moe = "},
           {"quantization", {{"bits", 4}}, "quantization = "},
           {"vision_encoder", {{"dim", 8}}, "vision_encoder = "},
           {"use_qk_norm", true, "use_qk_norm = true: must be absent"},
           {"_sliding_window", {nullptr, 64}, "_sliding_window = [null,64]"},
           {"model_type", "mamba", "must be \"transformer\""},
           {"activation", "gelu", "must be \"silu\""},
           {"causal", false, "must be true"}}) {
    const Status refused = read(key, value).status();
    EXPECT_EQ(refused.code(), Code::kInvalidArgument) << key;
    EXPECT_SAYS(refused, why);
  }
}

TEST(OtherFormats, ReadsConsolidatedNames) {
  const SmallFolder f(Dtype::kBf16);
  std::filesystem::remove(f.path() + "/config.json");
  std::filesystem::remove(f.path() + "/model.safetensors");
  std::vector<TensorShape> shapes = f.shapes;
  std::vector<std::string> tensors;
  for (TensorShape& t : shapes) {
    tensors.push_back(stored(f, t.name));
    t.name = meta_name(t.name);
  }
  f.put("consolidated.safetensors", weights_file(shapes, tensors, f.dtype));
  nlohmann::json params = {{"dim", 8},         {"n_layers", 2},
                           {"n_heads", 4},     {"n_kv_heads", 2},
                           {"norm_eps", 1e-5}, {"vocab_size", -1}};
  f.put("params.json", params.dump());
  expect_same(f, f.path());
  // Older files have rotary frequencies; other names are refused, and so are
  // Hugging Face's, whose rows of queries and keys are in another order.
  const auto with = [&](const std::string& name, const std::string& tensor) {
    std::vector<TensorShape> more = shapes;
    std::vector<std::string> bytes = tensors;
    more.push_back({name, {static_cast<int64_t>(tensor.size()) / 2}});
    bytes.push_back(tensor);
    f.put("consolidated.safetensors", weights_file(more, bytes, f.dtype));
    return ModelFolder::open(*posix_file_system(), f.path()).status();
  };
  EXPECT_OK(with("rope.freqs", "1234"));
  EXPECT_OK(with("layers.0.attention.inner_attention.rope.freqs", "1234"));
  for (const std::string name :
       {"model.norm.weight", "model.layers.0.self_attn.q_proj.weight",
        "layers.0.attention.wq.bias", "vision_encoder.ln_pre.weight"}) {
    const Status refused = with(name, "1234");
    EXPECT_EQ(refused.code(), Code::kInvalidArgument) << refused.to_string();
    EXPECT_SAYS(refused,
                "params.json: tensor \"" + name + "\" is no parameter");
  }
  f.put("consolidated.safetensors", weights_file(shapes, tensors, f.dtype));
  params["moe"] = {{"num_experts", 8}};
  f.put("params.json", params.dump());
  EXPECT_FALSE(ModelFolder::open(*posix_file_system(), f.path()).ok());
  std::filesystem::remove(f.path() + "/consolidated.safetensors");
  EXPECT_SAYS(ModelFolder::open(*posix_file_system(), f.path()), ".pth");
}

}  // namespace
}  // namespace remesh::huggingface
