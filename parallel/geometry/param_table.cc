#include "parallel/geometry/param_table.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "proto/base/rng.h"

namespace remesh::geometry {

int64_t ParamSpec::numel() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1},
                         std::multiplies<>());
}

ParamTable ParamTable::llama(const ModelConfig& c) {
  CHECK(c.validate().ok());
  ParamTable t;
  t.config_ = c;
  const auto matrix = [&](std::string name, int64_t rows, int64_t cols,
                          Role role, int64_t layer, TensorSplit split,
                          int64_t unit, double std) {
    t.specs_.push_back({.name = std::move(name),
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
    t.specs_.push_back({.name = std::move(name),
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
  t.offsets_.push_back(0);
  for (const ParamSpec& s : t.specs_)
    t.offsets_.push_back(t.offsets_.back() + s.numel());
  return t;
}

int ParamTable::find(Role role, int64_t layer) const {
  for (size_t i = 0; i < specs_.size(); ++i)
    if (specs_[i].role == role && specs_[i].layer == layer)
      return static_cast<int>(i);
  return -1;
}

int ParamTable::find(const std::string& name) const {
  for (size_t i = 0; i < specs_.size(); ++i)
    if (specs_[i].name == name) return static_cast<int>(i);
  return -1;
}

size_t ParamTable::param_at(int64_t e) const {
  CHECK(e >= 0 && e < num_elements());
  const auto it = std::upper_bound(offsets_.begin(), offsets_.end(), e);
  return static_cast<size_t>(it - offsets_.begin()) - 1;
}

float ParamTable::initial_value(uint64_t seed, size_t i, int64_t e) const {
  const ParamSpec& s = specs_[i];
  if (s.init == Init::kOnes) return 1.0F;
  return static_cast<float>(s.init_std) *
         random_normal(seed, hash64(s.name), static_cast<uint64_t>(e));
}

}  // namespace remesh::geometry
