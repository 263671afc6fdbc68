// A small model as a Hugging Face folder on disk, with random weights.
#pragma once

#include <cstring>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/huggingface/config.h"
#include "checkpoint/huggingface/file_tensors.h"
#include "checkpoint/huggingface/model_folder.h"
#include "checkpoint/huggingface/safetensors.h"
#include "parallel/geometry/slice.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "tests/testing/llama.h"

namespace remesh::huggingface {

inline geometry::ModelConfig small_model() {
  return geometry::llama(8, 2, 4, 2, 12, 11);
}

// The same in each family, with what only that one has.
inline std::vector<geometry::ModelConfig> small_models() {
  std::vector<geometry::ModelConfig> out;
  for (const char* arch : {"llama", "mistral", "qwen2", "qwen3", "phi3"}) {
    geometry::ModelConfig& m = out.emplace_back(small_model());
    m.arch = arch;
    if (geometry::has_window(m.arch)) m.sliding_window = 5;
    if (m.arch == "qwen3") m.set_head_dim(6);
  }
  return out;
}

// What Meta's files call a parameter.
inline std::string meta_name(std::string name) {
  static const std::pair<const char*, const char*> kNames[] = {
      {"self_attn.q_proj", "attention.wq"},
      {"self_attn.k_proj", "attention.wk"},
      {"self_attn.v_proj", "attention.wv"},
      {"self_attn.o_proj", "attention.wo"},
      {"mlp.gate_proj", "feed_forward.w1"},
      {"mlp.down_proj", "feed_forward.w2"},
      {"mlp.up_proj", "feed_forward.w3"},
      {"input_layernorm", "attention_norm"},
      {"post_attention_layernorm", "ffn_norm"},
      {"model.embed_tokens", "tok_embeddings"},
      {"model.norm", "norm"},
      {"lm_head", "output"}};
  for (const auto& [ours, meta] : kNames)
    if (const size_t at = name.find(ours); at != std::string::npos)
      name.replace(at, std::string(ours).size(), meta);
  return name.starts_with("model.") ? name.substr(6) : name;
}

// Random elements of every size, without infinities and NaN.
inline std::string random_elements(int64_t n, Dtype d, std::mt19937_64& rng) {
  std::string bytes;
  for (int64_t i = 0; i < n; ++i) {
    auto bits = static_cast<uint32_t>(rng());
    // The top bit of the exponent.
    const uint32_t exponent = d == Dtype::kFp32 ? 0x40000000 : 0x4000;
    bits &= ~exponent;
    bytes.append(reinterpret_cast<const char*>(&bits), dtype_size(d));
  }
  return bytes;
}

// The text of a file with the tensors of these shapes, one string each.
inline std::string weights_file(const std::vector<TensorShape>& shapes,
                                const std::vector<std::string>& tensors,
                                Dtype d) {
  std::string file = safetensors_header(shapes, d);
  for (const std::string& t : tensors) file += t;
  return file;
}

struct SmallFolder {
  explicit SmallFolder(Dtype d,
                       const geometry::ModelConfig& model = small_model(),
                       uint64_t seed = 1)
      : dtype(d), table(geometry::ParamTable::make(model)) {
    std::mt19937_64 rng(seed);
    for (const geometry::ParamSpec& spec : table.specs()) {
      shapes.push_back({spec.name, spec.shape});
      tensors.push_back(random_elements(spec.numel(), d, rng));
    }
    put("config.json", config_json({.model = model}, d));
    // A tensor of the file may hold several parameters, one after the other.
    std::vector<TensorShape> in_file;
    for (const FileTensor& t : file_tensors(table)) in_file.push_back(t.tensor);
    put("model.safetensors", weights_file(in_file, tensors, dtype));
  }
  std::string path() const { return dir.path(); }
  void put(const std::string& name, const std::string& text) const {
    testing::write_whole(path() + "/" + name, text);
  }
  void put_weights() const {
    put("model.safetensors", weights_file(shapes, tensors, dtype));
  }
  // The tensors [first, last) in a file of their own.
  void put_part(const std::string& name, size_t first, size_t last) const {
    const auto at = [](size_t i) { return static_cast<std::ptrdiff_t>(i); };
    put(name,
        weights_file({shapes.begin() + at(first), shapes.begin() + at(last)},
                     {tensors.begin() + at(first), tensors.begin() + at(last)},
                     dtype));
  }

  testing::TempDir dir;
  Dtype dtype;
  geometry::ParamTable table;
  std::vector<TensorShape> shapes;
  std::vector<std::string> tensors;  // bytes
};

// That the model at `path` has the parameters of the folder.
inline void expect_same(const SmallFolder& f, const std::string& path) {
  ASSERT_OK_AND(const auto model,
                ModelFolder::open(*posix_file_system(), path));
  for (size_t p = 0; p < f.table.size(); ++p) {
    const geometry::Rect all = geometry::full_rect(f.table[p]);
    std::vector<float> values(static_cast<size_t>(all.numel()));
    ASSERT_OK(model.read(p, all, values.data(), all.cols));
    std::string bytes(f.tensors[p].size(), '\0');
    write_elements(f.dtype, values, std::as_writable_bytes(std::span(bytes)));
    EXPECT_EQ(bytes, f.tensors[p]) << f.shapes[p].name;
  }
}

}  // namespace remesh::huggingface
