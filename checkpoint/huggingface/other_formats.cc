#include "checkpoint/huggingface/other_formats.h"

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <set>
#include <string_view>
#include <utility>

#include "checkpoint/huggingface/json.h"
#include "proto/base/json_reader.h"

namespace remesh::huggingface {
namespace {

using geometry::ModelConfig;
using Shape = std::vector<int64_t>;

// llama2.c, in both versions.
constexpr double kNormEps = 1e-5;
constexpr uint32_t kMagic = 0x616b3432;  // "ak42"
constexpr size_t kIntegers = 7;
constexpr size_t kHeaderBytes = 256;  // of version 1

std::string layer_name(int64_t layer, const char* name) {
  return fmt::format("model.layers.{}.{}.weight", layer, name);
}

// Takes fp32 tensors from the front of a file.
class Taker {
 public:
  Taker(std::span<const std::byte> bytes, Tensors& out)
      : bytes_(bytes), out_(out) {}

  void take(const std::string& name, const Shape& shape) {
    Tensor t{.dtype = Dtype::kFp32,
             .dtype_name = header_name(Dtype::kFp32),
             .shape = shape};
    const auto need =
        static_cast<uint64_t>(t.numel()) * dtype_size(Dtype::kFp32);
    needed_ += need;
    if (needed_ > bytes_.size()) return;
    t.bytes = bytes_.subspan(needed_ - need, need);
    if (!name.empty()) out_.emplace(name, std::move(t));
  }
  // One of each layer, consecutively.
  void take_layers(const ModelConfig& m, const char* name, const Shape& shape) {
    for (int64_t l = 0; l < m.n_layers; ++l) take(layer_name(l, name), shape);
  }
  uint64_t needed() const { return needed_; }

 private:
  std::span<const std::byte> bytes_;
  Tensors& out_;
  uint64_t needed_ = 0;
};

void take_matrices(const ModelConfig& m, Taker& t) {
  t.take_layers(m, "self_attn.q_proj", {m.dim, m.dim});
  t.take_layers(m, "self_attn.k_proj", {m.kv_dim(), m.dim});
  t.take_layers(m, "self_attn.v_proj", {m.kv_dim(), m.dim});
  t.take_layers(m, "self_attn.o_proj", {m.dim, m.dim});
}

void take_feed_forward(const ModelConfig& m, Taker& t) {
  t.take_layers(m, "mlp.gate_proj", {m.hidden_dim, m.dim});
  t.take_layers(m, "mlp.down_proj", {m.dim, m.hidden_dim});
  t.take_layers(m, "mlp.up_proj", {m.hidden_dim, m.dim});
}

void take_version_0(const Config& c, Taker& t) {
  const ModelConfig& m = c.model;
  t.take("model.embed_tokens.weight", {m.vocab_size, m.dim});
  t.take_layers(m, "input_layernorm", {m.dim});
  take_matrices(m, t);
  t.take_layers(m, "post_attention_layernorm", {m.dim});
  take_feed_forward(m, t);
  t.take("model.norm.weight", {m.dim});
  // Rotary tables, which are recomputed.
  t.take("", {c.max_position, m.head_dim()});
}

void take_version_1(const ModelConfig& m, Taker& t) {
  t.take_layers(m, "input_layernorm", {m.dim});
  t.take_layers(m, "post_attention_layernorm", {m.dim});
  t.take("model.norm.weight", {m.dim});
  t.take("model.embed_tokens.weight", {m.vocab_size, m.dim});
  take_matrices(m, t);
  take_feed_forward(m, t);
}

// "layers.3.attention.wq.weight" as Hugging Face has it; "" if it is none.
std::string from_meta(const std::string& name) {
  static constexpr std::array<std::pair<const char*, const char*>, 3> kOthers =
      {{{"tok_embeddings.weight", "model.embed_tokens.weight"},
        {"norm.weight", "model.norm.weight"},
        {"output.weight", "lm_head.weight"}}};
  static constexpr std::array<std::pair<const char*, const char*>, 9> kOfLayer =
      {{{"attention.wq", "self_attn.q_proj"},
        {"attention.wk", "self_attn.k_proj"},
        {"attention.wv", "self_attn.v_proj"},
        {"attention.wo", "self_attn.o_proj"},
        {"feed_forward.w1", "mlp.gate_proj"},
        {"feed_forward.w2", "mlp.down_proj"},
        {"feed_forward.w3", "mlp.up_proj"},
        {"attention_norm", "input_layernorm"},
        {"ffn_norm", "post_attention_layernorm"}}};
  for (const auto& [meta, ours] : kOthers)
    if (name == meta) return ours;
  constexpr std::string_view kLayers = "layers.", kWeight = ".weight";
  const size_t dot = name.find('.', kLayers.size());
  if (!name.starts_with(kLayers) || !name.ends_with(kWeight) ||
      dot == std::string::npos || name.size() < dot + 1 + kWeight.size())
    return "";
  const std::string part =
      name.substr(dot + 1, name.size() - dot - 1 - kWeight.size());
  for (const auto& [meta, ours] : kOfLayer)
    if (part == meta)
      return fmt::format("model.layers.{}.{}.weight",
                         name.substr(kLayers.size(), dot - kLayers.size()),
                         ours);
  return "";
}

// The keys of params.json that are read here or that change no result: sizes
// that the tensors have, and those of caches. Another one may change the
// arithmetic, unless it is off.
void refuse_other_params(const Json& json, JsonReader& r) {
  static const std::set<std::string_view> kKnown = {"_sliding_window",
                                                    "activation",
                                                    "causal",
                                                    "dim",
                                                    "ffn_dim_multiplier",
                                                    "head_dim",
                                                    "hidden_dim",
                                                    "max_batch_size",
                                                    "max_position_embeddings",
                                                    "max_seq_len",
                                                    "model_type",
                                                    "multiple_of",
                                                    "n_heads",
                                                    "n_kv_heads",
                                                    "n_layers",
                                                    "norm_eps",
                                                    "rope_high_freq_factor",
                                                    "rope_scaling_factor",
                                                    "rope_theta",
                                                    "sliding_window",
                                                    "tied_embeddings",
                                                    "use_scaled_rope",
                                                    "vocab_size"};
  for (const auto& [key, value] : json.items())
    if (!value.is_null() && value != false && !kKnown.contains(key))
      r.refuse(key, "absent");
  if (r.text("model_type", "transformer") != "transformer")
    r.refuse("model_type", "\"transformer\"");
  if (r.text("activation", "silu") != "silu")
    r.refuse("activation", "\"silu\"");
  if (!r.flag("causal", true)) r.refuse("causal", "true");
}

// An extent of a tensor, which params.json may leave out.
Result<int64_t> extent(const Tensors& tensors, const std::string& of,
                       size_t dim, const std::string& name) {
  const auto it = tensors.find(of);
  if (it == tensors.end() || it->second.shape.size() != 2)
    return invalid_argument(
        fmt::format("{}: matrix {} is missing", name, printable(of)));
  return it->second.shape[dim];
}

}  // namespace

int64_t interleaved_row(int64_t row, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  const int64_t in_head = row % head_dim;
  return row - in_head + in_head % half * 2 + in_head / half;
}

Result<NamedTensors> parse_llama2c(std::span<const std::byte> file,
                                   const std::string& name) {
  std::array<int32_t, kIntegers + 2> head = {};
  if (file.size() < sizeof(head))
    return corrupt(fmt::format("{}: truncated: {} bytes", name, file.size()));
  std::memcpy(head.data(), file.data(), sizeof(head));
  const bool current = static_cast<uint32_t>(head[0]) == kMagic;
  if (current && (head[1] != 1 || file.size() < kHeaderBytes))
    return invalid_argument(fmt::format(
        "{}: version {} of llama2.c's format: only 0 and 1, which are not "
        "quantized, are supported",
        name, head[1]));
  const int32_t* const n = head.data() + (current ? 2 : 0);
  const auto shared =
      current ? static_cast<bool>(file[(kIntegers + 2) * sizeof(int32_t)])
              : n[5] > 0;
  NamedTensors out;
  Config& c = out.config;
  c.model = {.dim = n[0],
             .n_layers = n[2],
             .n_heads = n[3],
             .n_kv_heads = n[4],
             .hidden_dim = n[1],
             .vocab_size = n[5] < 0 && !current ? -int64_t{n[5]} : n[5],
             .norm_eps = kNormEps,
             .tie_embeddings = shared};
  c.max_position = n[6];
  c.bos_token_id = c.eos_token_id = "1";  // one token between two texts
  if (const Status s = c.model.validate(); !s.ok())
    return corrupt(name + ": not a file of llama2.c: " + s.message());
  if (c.max_position < 1 || c.max_position > (1 << 24))
    return corrupt(fmt::format("{}: not a file of llama2.c: a context of {}",
                               name, c.max_position));
  Taker t(file.subspan(current ? kHeaderBytes : kIntegers * sizeof(int32_t)),
          out.tensors);
  if (current)
    take_version_1(c.model, t);
  else
    take_version_0(c, t);
  if (!shared) t.take("lm_head.weight", {c.model.vocab_size, c.model.dim});
  const uint64_t header = current ? kHeaderBytes : kIntegers * sizeof(int32_t);
  if (file.size() != header + t.needed())
    return corrupt(fmt::format(
        "{}: {} bytes, but its header implies {} (is it truncated?)", name,
        file.size(), header + t.needed()));
  return out;
}

Result<NamedTensors> parse_consolidated(std::string_view params,
                                        const Tensors& tensors,
                                        const std::string& name) {
  ASSIGN_OR_RETURN(const Json json, parse_json(params, name));
  NamedTensors out;
  for (const auto& [key, tensor] : tensors) {
    const std::string ours = from_meta(key);
    // Rotary frequencies are recomputed.
    if (ours.empty() && key.ends_with("rope.freqs")) continue;
    // Hugging Face's names are no exception: they have other rows of queries
    // and keys, and would give a parameter a second time.
    if (ours.empty())
      return invalid_argument(
          fmt::format("{}: tensor {} is no parameter of Meta's Llama models",
                      name, printable(key)));
    out.tensors.emplace(ours, tensor);
  }
  JsonReader r(json, name);
  refuse_other_params(json, r);
  ModelConfig& m = out.config.model;
  m.dim = r.integer("dim", 0);
  m.n_layers = r.integer("n_layers", 0);
  m.n_heads = r.integer("n_heads", 0);
  m.n_kv_heads = r.integer("n_kv_heads", m.n_heads);
  if (r.find("head_dim") != nullptr) m.set_head_dim(r.integer("head_dim", 0));
  // Mistral's, which also reads its newer name.
  const char* const window = r.any_of({"sliding_window", "_sliding_window"});
  if (r.find(window) != nullptr) {
    m.arch = "mistral";
    m.sliding_window = r.integer(window, 0);
  }
  m.norm_eps = r.number("norm_eps", 1e-5);
  m.rope_theta = r.number("rope_theta", 10000);
  m.tie_embeddings =
      r.flag("tied_embeddings", !out.tensors.contains("lm_head.weight"));
  if (r.flag("use_scaled_rope", false)) {
    m.rope_scaled = true;
    m.rope_scaling.factor = r.number("rope_scaling_factor", 8);
    m.rope_scaling.high_freq_factor =
        r.number("rope_high_freq_factor", m.rope_scaling.high_freq_factor);
  }
  RETURN_IF_ERROR(r.problem());
  ASSIGN_OR_RETURN(
      m.hidden_dim,
      extent(out.tensors, layer_name(0, "mlp.gate_proj"), 0, name));
  ASSIGN_OR_RETURN(m.vocab_size,
                   extent(out.tensors, "model.embed_tokens.weight", 0, name));
  if (const Status valid = m.validate(); !valid.ok())
    return valid.with_context(name);
  return out;
}

}  // namespace remesh::huggingface
