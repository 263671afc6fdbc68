// ParamTable: every parameter that is trained, once: the model's, or with
// low-rank adapters (lora.h) those alone. The single source for allocation,
// initialisation, sharding, gradients, optimizer, checkpoint, resharding and
// the memory estimate. Independent of any mesh.
//
// The canonical flat order is the order of the table: parameter i occupies
// elements [offset(i), offset(i) + numel(i)) of a flat fp32 vector of
// num_elements(). With tied embeddings there is no lm_head entry.
//
// Names and shapes are those of Hugging Face for the model family (family.h): a
// linear layer's weight is (out_features, in_features), row-major.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/geometry/model_config.h"

namespace remesh::geometry {

enum class Init { kNormal, kOnes, kZeros };

// How tensor parallelism splits a parameter (Shoeybi et al. 2019).
enum class TensorSplit {
  kNone,     // replicated (norms)
  kRows,     // dim 0: column-parallel linear (q, k, v, gate, up), its bias,
             // embedding
  kColumns,  // dim 1: row-parallel linear (o, down)
};

// The place of a parameter in the model.
enum class Role {
  kEmbedding,
  kInputNorm,
  kQuery,
  kKey,
  kValue,
  kQueryBias,
  kKeyBias,
  kValueBias,
  kQueryNorm,  // of each head
  kKeyNorm,
  kOutput,
  kPostNorm,
  kGate,
  kUp,
  kDown,
  kFinalNorm,
  kHead,
};

// Whether its units are key/value heads, which tensor-parallel ranks share if
// there are fewer of them than ranks.
constexpr bool has_kv_heads(Role role) {
  return role == Role::kKey || role == Role::kValue || role == Role::kKeyBias ||
         role == Role::kValueBias;
}

struct ParamSpec {
  std::string name;
  std::vector<int64_t> shape;  // unsharded, 1 or 2 dims
  Role role = Role::kEmbedding;
  int64_t layer = -1;  // 0..n_layers-1 for block parameters, else -1
  TensorSplit split = TensorSplit::kNone;
  int64_t split_unit = 1;  // elements along the split dim that stay together
                           // (head_dim for q, k, v, o; else 1)
  Init init = Init::kNormal;
  double init_std = 0.02;
  bool decay = true;  // weight decay, only on tensors of two dims
  int64_t numel() const;
};

class ParamTable {
 public:
  // The parameters of the family config.arch, or the adapters of their targets.
  // REQUIRES: config.validate().ok().
  static ParamTable make(const ModelConfig& config);

  const ModelConfig& config() const { return config_; }
  size_t size() const { return specs_.size(); }
  const ParamSpec& operator[](size_t i) const { return specs_[i]; }
  const std::vector<ParamSpec>& specs() const { return specs_; }
  int64_t offset(size_t i) const { return offsets_[i]; }
  int64_t num_elements() const { return offsets_.back(); }
  // Index of the first parameter with that role (and layer), or -1.
  int find(Role role, int64_t layer = -1) const;
  int find(const std::string& name) const;

 private:
  ModelConfig config_;
  std::vector<ParamSpec> specs_;
  std::vector<int64_t> offsets_;  // size() + 1 entries
};

}  // namespace remesh::geometry
