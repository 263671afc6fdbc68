#include "parallel/geometry/llama.h"

#include <cmath>

namespace remesh::geometry {

std::vector<ParamSpec> llama_parameters(const ModelConfig& c) {
  std::vector<ParamSpec> specs;
  const auto matrix = [&](std::string name, int64_t rows, int64_t cols,
                          Role role, int64_t layer, TensorSplit split,
                          int64_t unit, double std) {
    specs.push_back({.name = std::move(name),
                     .shape = {rows, cols},
                     .role = role,
                     .layer = layer,
                     .split = split,
                     .split_unit = unit,
                     .init = Init::kNormal,
                     .init_std = std,
                     .decay = true});
  };
  const auto norm = [&](std::string name, Role role, int64_t layer) {
    specs.push_back({.name = std::move(name),
                     .shape = {c.dim},
                     .role = role,
                     .layer = layer,
                     .init = Init::kOnes,
                     .decay = false});
  };
  constexpr double kStd = 0.02;
  // Projections into the residual stream start smaller the deeper the model
  // (GPT-2, section 2.3), so that the stream's variance does not grow.
  const double residual_std =
      kStd / std::sqrt(2.0 * static_cast<double>(c.n_layers));
  const int64_t hd = c.head_dim();
  matrix("model.embed_tokens.weight", c.vocab_size, c.dim, Role::kEmbedding, -1,
         TensorSplit::kRows, 1, kStd);
  for (int64_t l = 0; l < c.n_layers; ++l) {
    const std::string p = "model.layers." + std::to_string(l) + ".";
    norm(p + "input_layernorm.weight", Role::kInputNorm, l);
    matrix(p + "self_attn.q_proj.weight", c.dim, c.dim, Role::kQuery, l,
           TensorSplit::kRows, hd, kStd);
    matrix(p + "self_attn.k_proj.weight", c.kv_dim(), c.dim, Role::kKey, l,
           TensorSplit::kRows, hd, kStd);
    matrix(p + "self_attn.v_proj.weight", c.kv_dim(), c.dim, Role::kValue, l,
           TensorSplit::kRows, hd, kStd);
    matrix(p + "self_attn.o_proj.weight", c.dim, c.dim, Role::kOutput, l,
           TensorSplit::kColumns, hd, residual_std);
    norm(p + "post_attention_layernorm.weight", Role::kPostNorm, l);
    matrix(p + "mlp.gate_proj.weight", c.hidden_dim, c.dim, Role::kGate, l,
           TensorSplit::kRows, 1, kStd);
    matrix(p + "mlp.up_proj.weight", c.hidden_dim, c.dim, Role::kUp, l,
           TensorSplit::kRows, 1, kStd);
    matrix(p + "mlp.down_proj.weight", c.dim, c.hidden_dim, Role::kDown, l,
           TensorSplit::kColumns, 1, residual_std);
  }
  norm("model.norm.weight", Role::kFinalNorm, -1);
  if (!c.tie_embeddings)
    matrix("lm_head.weight", c.vocab_size, c.dim, Role::kHead, -1,
           TensorSplit::kRows, 1, kStd);
  return specs;
}

}  // namespace remesh::geometry
