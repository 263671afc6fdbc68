// ModelConfig: the family and the sizes of a model, as one plain value.
//
// Field names follow torchtitan's ModelArgs; the golden files and checkpoints
// use the Hugging Face names in the comments.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::geometry {

// Frequency scaling of Llama 3.1 ("rope_type": "llama3" in Hugging Face).
struct RopeScaling {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_max_position = 8192;
  friend bool operator==(const RopeScaling&, const RopeScaling&) = default;
};

// Whether an architecture has attention over a window.
inline bool has_window(const std::string& arch) {
  return arch == "mistral" || arch == "phi3";
}

// Low-rank adapters (LoRA, Hu et al. 2022): the weight W of each target matrix
// becomes W + alpha / rank * B A. A (rank, in) and B (out, rank) are trained,
// everything else is frozen.
struct Lora {
  int64_t rank = 0;  // 0: no adapters
  double alpha = 16;
  std::vector<std::string> targets;  // of lora_targets() (lora.h), in its order
  double scale() const { return alpha / static_cast<double>(rank); }
  friend bool operator==(const Lora&, const Lora&) = default;
};

struct ModelConfig {
  int64_t dim = 0;         // hidden_size
  int64_t n_layers = 0;    // num_hidden_layers
  int64_t n_heads = 0;     // num_attention_heads
  int64_t n_kv_heads = 0;  // num_key_value_heads
  int64_t hidden_dim = 0;  // intermediate_size
  int64_t vocab_size = 0;
  double norm_eps = 1e-5;       // rms_norm_eps
  double rope_theta = 10000.0;  // rope_theta
  bool tie_embeddings = false;  // tie_word_embeddings
  bool rope_scaled = false;     // rope_scaling present, rope_type llama3
  RopeScaling rope_scaling;
  std::string arch = "llama";  // model_type; see family.h
  // head_dim where it is not dim / n_heads; 0: it is.
  int64_t head_size = 0;
  // Tokens that a token attends to, itself included (Mistral, Phi-3); 0: all.
  int64_t sliding_window = 0;
  // With adapters, they alone are the parameters (param_table.h).
  Lora lora;

  // The same model without adapters.
  ModelConfig base() const {
    ModelConfig out = *this;
    out.lora = {};
    return out;
  }
  int64_t head_dim() const { return head_size > 0 ? head_size : dim / n_heads; }
  // Sets head_size; size > 0.
  void set_head_dim(int64_t size) {
    head_size = size * n_heads == dim ? 0 : size;
  }
  int64_t q_dim() const { return n_heads * head_dim(); }
  int64_t kv_dim() const { return n_kv_heads * head_dim(); }
  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;

  // Names the field, its value and what is allowed: a known family, sizes
  // within the bounds of a job file, n_heads divides dim unless head_size is
  // given, n_kv_heads divides n_heads, head_dim even, a window only where the
  // family has it, adapters of known matrices.
  Status validate() const;
};

// What is called the same in pb::Model of a job and pb::ModelInfo of a
// checkpoint.
template <typename Message>
void sizes_to_message(const ModelConfig& c, Message* out) {
  out->set_dim(c.dim);
  out->set_n_layers(c.n_layers);
  out->set_n_heads(c.n_heads);
  out->set_n_kv_heads(c.n_kv_heads);
  out->set_hidden_dim(c.hidden_dim);
  out->set_vocab_size(c.vocab_size);
  out->set_norm_eps(c.norm_eps);
  out->set_rope_theta(c.rope_theta);
  out->set_tie_embeddings(c.tie_embeddings);
}
template <typename Message>
ModelConfig config_of(const Message& m) {
  return {.dim = m.dim(),
          .n_layers = m.n_layers(),
          .n_heads = m.n_heads(),
          .n_kv_heads = m.n_kv_heads(),
          .hidden_dim = m.hidden_dim(),
          .vocab_size = m.vocab_size(),
          .norm_eps = m.norm_eps(),
          .rope_theta = m.rope_theta(),
          .tie_embeddings = m.tie_embeddings(),
          .arch = m.arch(),
          .sliding_window = m.sliding_window()};
}

}  // namespace remesh::geometry
