// Files of models as others write them, as text.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>

namespace remesh::huggingface {

inline std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// A safetensors file of this header and this many bytes of data.
inline std::string safetensors(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  file += header;
  for (size_t i = 0; i < data_bytes; ++i) file += static_cast<char>(i);
  return file;
}

inline const char kSmallHeader[] =
    R"({"__metadata__":{"format":"pt"},)"
    R"("b":{"dtype":"F16","shape":[3],"data_offsets":[16,22]},)"
    R"("a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
    R"("c":{"dtype":"I64","shape":[],"data_offsets":[22,30]},)"
    R"("e":{"dtype":"U8","shape":[0,7],"data_offsets":[22,22]}} )";
inline constexpr size_t kSmallBytes = 30;

// Llama 3.1 8B's, before and since transformers 5.
inline const char kOldConfig[] = R"({
  "architectures": ["LlamaForCausalLM"], "attention_bias": false,
  "attention_dropout": 0.0, "bos_token_id": 128000,
  "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
  "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
  "max_position_embeddings": 131072, "mlp_bias": false,
  "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 128256})";
inline const char kNewConfig[] = R"({
  "architectures": ["LlamaForCausalLM"], "bos_token_id": 128000,
  "dtype": "bfloat16", "eos_token_id": [128001, 128008, 128009],
  "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
  "intermediate_size": 14336, "max_position_embeddings": 131072,
  "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
  "rope_parameters": {"factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0, "rope_type": "llama3"},
  "vocab_size": 128256})";

}  // namespace remesh::huggingface
