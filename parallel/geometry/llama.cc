#include "parallel/geometry/llama.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace remesh::geometry {
namespace {

constexpr int64_t kFp32 = 4;
constexpr int64_t kHeadPiece = 4096;  // logits worked on at a time

// The legend is in llama.h.
struct Sizes {
  int64_t D = 0, q = 0, kv = 0, F = 0, V = 0, heads = 0, half_head = 0;
  int64_t qk_norm = 0;  // elements of a head's norm; 0: there is none
  int64_t qk_heads = 0;
  int64_t N = 0, n = 0, P = 0;
  int64_t d = kFp32;
};

int64_t rows_of(const ShardTable& shard, Role role, int64_t layer = -1) {
  const int i = shard.find(role, layer);
  return i < 0 ? 0 : shard[static_cast<size_t>(i)].rect.rows;
}

Sizes sizes_of(const ShardTable& shard, int chunk, const ChunkUse& use) {
  const ModelConfig& c = shard.table().config();
  const int64_t layer = shard.first_layer(chunk);
  const int tp = shard.layout().tp;
  Sizes s{.D = c.dim,
          .q = rows_of(shard, Role::kQuery, layer),
          .kv = rows_of(shard, Role::kKey, layer),
          .F = rows_of(shard, Role::kGate, layer),
          .half_head = c.head_dim() / 2,
          .N = use.max_batch * (use.max_seq / shard.layout().cp),
          .d = use.bf16 ? 2 : kFp32};
  if (shard.has_head(chunk))
    s.V = rows_of(shard, c.tie_embeddings ? Role::kEmbedding : Role::kHead);
  s.heads = s.q / c.head_dim();
  s.qk_heads = s.heads + s.kv / c.head_dim();
  if (shard.find(Role::kQueryNorm, layer) >= 0) s.qk_norm = c.head_dim();
  s.n = (s.N + tp - 1) / tp;
  s.P = s.n * tp;
  return s;
}

// What the norms of heads read in backward: queries and keys before them.
int64_t head_norm_bytes(const Sizes& s) {
  return s.qk_norm == 0 ? 0 : s.N * ((s.q + s.kv) * s.d + s.qk_heads * kFp32);
}

int64_t layer_activations(const Sizes& s, Recompute r, bool split) {
  // What a split backward keeps for the weight gradients need not be computed
  // again.
  if (split && r == Recompute::kSelective) r = Recompute::kNone;
  int64_t bytes = s.n * s.D * kFp32;  // x
  const int64_t norms = 2 * s.P * s.D * s.d;
  const int64_t attention = s.N * s.q * s.d;
  const int64_t gate_up = s.N * 2 * s.F * s.d;
  const int64_t qkv = s.N * (s.q + 2 * s.kv) * s.d;
  if (r != Recompute::kFull)
    bytes += norms + qkv + s.n * s.D * kFp32 + 2 * s.n * kFp32 +  // x1, rstd
             head_norm_bytes(s);
  if (r == Recompute::kNone)
    bytes += attention + gate_up + s.N * s.heads * kFp32;
  if (split) {
    if (r == Recompute::kFull) bytes += norms + attention + gate_up;
    // swiglu, gradients of the layer's output and middle, of q, k, v, norms
    bytes += s.N * s.F * s.d + 2 * s.P * s.D * s.d + qkv + 2 * s.D * kFp32 +
             2 * s.qk_norm * kFp32;
  }
  return bytes;
}

int64_t activation_bytes(const Sizes& s, const ShardTable& shard, int chunk,
                         const ChunkUse& use) {
  const bool split = use.split_backward;
  int64_t bytes = 0;
  for (const Recompute r : use.recompute)
    bytes += layer_activations(s, r, split);
  if (shard.has_head(chunk)) {
    bytes += s.n * s.D * kFp32 + s.P * s.D * s.d + s.n * kFp32 + 2 * s.N * 4;
    const Recompute last = use.recompute.back();
    const bool all =
        last == Recompute::kNone || (split && last == Recompute::kSelective);
    if (use.bf16 && all) bytes += s.N * s.V * s.d;  // logits
    if (split) bytes += s.D * kFp32;
  } else {
    bytes += s.n * s.D * kFp32;  // output
  }
  if (shard.has_embedding(chunk)) {
    bytes += s.N * 4;
    if (split) bytes += s.n * s.D * kFp32;
  }
  return bytes;
}

int64_t buffer_bytes(const Sizes& s, const ShardTable& shard, int chunk,
                     const ChunkUse& use) {
  const Layout& l = shard.layout();
  const bool split = use.split_backward;
  const auto some_layer = [&](auto is) {
    return std::ranges::any_of(use.recompute, is);
  };
  // Layers that compute attention and SwiGLU again, and those that compute
  // everything again.
  const bool some =
      !split && some_layer([](Recompute r) { return r != Recompute::kNone; });
  const bool full =
      some_layer([](Recompute r) { return r == Recompute::kFull; });
  const int64_t stream = s.n * s.D * kFp32;
  const int64_t normed = s.P * s.D * s.d;
  const int64_t qkv = s.N * (s.q + 2 * s.kv) * s.d;
  int64_t bytes = s.P * s.D * kFp32;  // the result of a GEMM into the stream
  if (l.tp > 1) bytes += stream;
  if (use.bf16 || split) bytes += stream;  // its gradient
  if (!split) bytes += normed + qkv + (s.D + 2 * s.qk_norm) * kFp32;
  bytes += head_norm_bytes(s);
  bytes += normed + s.n * kFp32 + s.N * s.heads * kFp32 +
           s.N * 3 * s.F * s.d;         // norm, lse, gate and up, swiglu
  if (full && !split) bytes += normed;  // the second norm
  if (full) bytes += s.n * kFp32 + stream + qkv;  // x1
  if (!full && split) bytes += qkv;
  bytes += s.N * s.q * s.d;  // gradient of attention's output
  if (some) bytes += s.N * s.q * s.d + s.N * s.F * s.d;
  bytes += stream;  // of an evaluation
  if (shard.has_embedding(chunk)) bytes += s.N * 4;
  if (shard.has_head(chunk)) {
    bytes += s.N * std::min(kHeadPiece, s.V) * s.d + 5 * s.N * 4;
    if (l.tp > 1) bytes += s.N * 4;
  }
  if (l.cp > 1)
    bytes += s.N * s.q * kFp32 + 2 * s.N * 2 * s.kv * s.d +
             2 * 3 * s.N * s.kv * kFp32;
  bytes += 2 * use.max_seq * s.half_head * kFp32;
  if (l.cp > 1) bytes += 2 * (use.max_seq / l.cp) * s.half_head * kFp32;
  return bytes;
}

int64_t weight_copy_bytes(const Sizes& s, const ChunkUse& use) {
  if (!use.bf16) return 0;
  const auto matrix = [&](int64_t rows, int64_t columns) {
    const auto up = [](int64_t n) { return (n + 31) / 32 * 32; };
    return use.packed ? 2 * up(rows) * up(columns) : rows * columns;
  };
  const auto layers = static_cast<int64_t>(use.recompute.size());
  const int64_t copies =
      use.block_buffers == 0 ? layers : std::min(use.block_buffers, layers);
  const int64_t block = matrix(s.q + 2 * s.kv, s.D) + matrix(s.D, s.q) +
                        matrix(2 * s.F, s.D) + matrix(s.D, s.F);
  return (copies * block + matrix(s.V, s.D)) * s.d;
}

constexpr double kStd = 0.02;

// Adds parameters to a list.
class Parameters {
 public:
  explicit Parameters(const ModelConfig& config) : c_(config) {}

  void matrix(std::string name, Role role, int64_t rows, int64_t cols,
              TensorSplit split, int64_t unit = 1, double std = kStd) {
    add({.name = std::move(name),
         .shape = {rows, cols},
         .role = role,
         .split = split,
         .split_unit = unit,
         .init_std = std});
  }
  void norm(std::string name, Role role, int64_t size) {
    add({.name = std::move(name),
         .shape = {size},
         .role = role,
         .init = Init::kOnes,
         .decay = false});
  }
  void bias(std::string name, Role role, int64_t heads) {
    add({.name = std::move(name),
         .shape = {heads * c_.head_dim()},
         .role = role,
         .split = TensorSplit::kRows,
         .split_unit = c_.head_dim(),
         .init = Init::kZeros,
         .decay = false});
  }
  void layer(int64_t index);
  std::vector<ParamSpec> take() { return std::move(specs_); }

 private:
  void add(ParamSpec spec) {
    spec.layer = layer_;
    specs_.push_back(std::move(spec));
  }
  void attention(const std::string& prefix, double residual_std);

  const ModelConfig& c_;
  std::vector<ParamSpec> specs_;
  int64_t layer_ = -1;  // of the parameters added
};

void Parameters::attention(const std::string& p, double residual_std) {
  const int64_t hd = c_.head_dim();
  matrix(p + "q_proj.weight", Role::kQuery, c_.q_dim(), c_.dim,
         TensorSplit::kRows, hd);
  matrix(p + "k_proj.weight", Role::kKey, c_.kv_dim(), c_.dim,
         TensorSplit::kRows, hd);
  matrix(p + "v_proj.weight", Role::kValue, c_.kv_dim(), c_.dim,
         TensorSplit::kRows, hd);
  if (c_.arch == "qwen2") {
    bias(p + "q_proj.bias", Role::kQueryBias, c_.n_heads);
    bias(p + "k_proj.bias", Role::kKeyBias, c_.n_kv_heads);
    bias(p + "v_proj.bias", Role::kValueBias, c_.n_kv_heads);
  }
  if (c_.arch == "qwen3") {
    norm(p + "q_norm.weight", Role::kQueryNorm, hd);
    norm(p + "k_norm.weight", Role::kKeyNorm, hd);
  }
  matrix(p + "o_proj.weight", Role::kOutput, c_.dim, c_.q_dim(),
         TensorSplit::kColumns, hd, residual_std);
}

void Parameters::layer(int64_t index) {
  layer_ = index;
  const std::string p = "model.layers." + std::to_string(index) + ".";
  // Projections into the residual stream start smaller the deeper the model
  // (GPT-2, section 2.3), so that the stream's variance does not grow.
  const double residual_std =
      kStd / std::sqrt(2.0 * static_cast<double>(c_.n_layers));
  norm(p + "input_layernorm.weight", Role::kInputNorm, c_.dim);
  attention(p + "self_attn.", residual_std);
  norm(p + "post_attention_layernorm.weight", Role::kPostNorm, c_.dim);
  matrix(p + "mlp.gate_proj.weight", Role::kGate, c_.hidden_dim, c_.dim,
         TensorSplit::kRows);
  matrix(p + "mlp.up_proj.weight", Role::kUp, c_.hidden_dim, c_.dim,
         TensorSplit::kRows);
  matrix(p + "mlp.down_proj.weight", Role::kDown, c_.dim, c_.hidden_dim,
         TensorSplit::kColumns, 1, residual_std);
  layer_ = -1;
}

}  // namespace

std::vector<ParamSpec> llama_parameters(const ModelConfig& c) {
  Parameters all(c);
  all.matrix("model.embed_tokens.weight", Role::kEmbedding, c.vocab_size, c.dim,
             TensorSplit::kRows);
  for (int64_t l = 0; l < c.n_layers; ++l) all.layer(l);
  all.norm("model.norm.weight", Role::kFinalNorm, c.dim);
  if (!c.tie_embeddings)
    all.matrix("lm_head.weight", Role::kHead, c.vocab_size, c.dim,
               TensorSplit::kRows);
  return all.take();
}

ChunkMemory llama_memory(const ShardTable& shard, int chunk,
                         const ChunkUse& use) {
  CHECK(static_cast<int64_t>(use.recompute.size()) ==
        shard.last_layer(chunk) - shard.first_layer(chunk));
  const Sizes s = sizes_of(shard, chunk, use);
  const auto bytes = [](int64_t n) { return static_cast<uint64_t>(n); };
  return {.weights = bytes(weight_copy_bytes(s, use)),
          .activations = bytes(activation_bytes(s, shard, chunk, use)),
          .buffers = bytes(buffer_bytes(s, shard, chunk, use)),
          .message = bytes(s.n * s.D * kFp32)};
}

}  // namespace remesh::geometry
