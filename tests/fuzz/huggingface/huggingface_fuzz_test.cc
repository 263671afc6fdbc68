// Fuzzes (tests/testing/fuzz.h) the files of Hugging Face models.

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/huggingface/config.h"
#include "checkpoint/huggingface/other_formats.h"
#include "checkpoint/huggingface/safetensors.h"
#include "tests/testing/expect.h"
#include "tests/testing/fuzz.h"
#include "tests/unit/huggingface/files.h"
#include "tests/unit/huggingface/small_folder.h"

namespace remesh::huggingface {
namespace {

// Reads every element of what is accepted.
TEST(HuggingFaceFuzz, Safetensors) {
  const std::string written =
      safetensors_header(std::vector<TensorShape>{{"model.norm.weight", {5}},
                                                  {"lm_head.weight", {3, 5}}},
                         Dtype::kBf16) +
      std::string(40, '\x3f');
  fuzz({safetensors(kSmallHeader, kSmallBytes), written}, 10000,
       [](const std::string& file) -> Status {
         ASSIGN_OR_RETURN(const Tensors tensors,
                          parse_safetensors(as_bytes(file), "m"));
         size_t bytes = 0;
         for (const auto& [name, t] : tensors) {
           bytes += t.bytes.size();
           EXPECT_LE(t.bytes.size(), file.size());
           if (t.dtype == Dtype::kOther) continue;
           std::vector<float> values(static_cast<size_t>(t.numel()));
           read_elements(t, 0, values);
         }
         EXPECT_LE(bytes + 8, file.size());
         return ok_status();
       });
}

TEST(HuggingFaceFuzz, Llama2c) {
  // dim 4, hidden 3, one layer, 2 heads, 1 for keys, 5 tokens, a context of 2.
  const std::vector<int32_t> sizes = {4, 3, 1, 2, 1, 5, 2};
  const size_t elements = 20 + 4 + 16 + 8 + 8 + 16 + 4 + 36 + 4 + 4;
  std::string file(reinterpret_cast<const char*>(sizes.data()), 28);
  file += std::string(4 * elements, '\x3f');
  fuzz({file}, 10000, [](const std::string& mutant) -> Status {
    ASSIGN_OR_RETURN(const NamedTensors m,
                     parse_llama2c(as_bytes(mutant), "m"));
    for (const auto& [name, t] : m.tensors) {
      std::vector<float> values(static_cast<size_t>(t.numel()));
      read_elements(t, 0, values);
    }
    return ok_status();
  });
}

// Opens the folder with each mutant as that file, and reads every parameter.
void fuzz_file(const std::string& folder, const std::string& name,
               const std::string& text) {
  const auto fs = posix_file_system();
  fuzz({text}, 3000, [&](const std::string& mutant) -> Status {
    testing::write_whole(path_join(folder, name), mutant);
    ASSIGN_OR_RETURN(const auto model, ModelFolder::open(*fs, folder));
    std::vector<float> values;
    for (size_t p = 0; p < model.table().size(); ++p) {
      const geometry::Rect all = geometry::full_rect(model.table()[p]);
      values.resize(static_cast<size_t>(all.numel()));
      RETURN_IF_ERROR(model.read(p, all, values.data(), all.cols));
    }
    return ok_status();
  });
  testing::write_whole(path_join(folder, name), text);
}

TEST(HuggingFaceFuzz, Index) {
  const SmallFolder f(Dtype::kBf16);
  const std::string names[] = {"a.safetensors", "b.safetensors"};
  f.put_part(names[0], 0, 5);
  f.put_part(names[1], 5, f.shapes.size());
  std::filesystem::remove(f.path() + "/model.safetensors");
  std::string map;
  for (size_t i = 0; i < f.shapes.size(); ++i)
    map += (i > 0 ? ",\"" : "\"") + f.shapes[i].name + "\":\"" +
           names[i < 5 ? 0 : 1] + "\"";
  fuzz_file(f.path(), "model.safetensors.index.json",
            R"({"metadata":{"total_size":1},"weight_map":{)" + map + "}}");
}

TEST(HuggingFaceFuzz, Consolidated) {
  const std::string p = "layers.0.";
  const std::vector<TensorShape> shapes = {
      {"tok_embeddings.weight", {5, 4}},
      {p + "attention.wq.weight", {4, 4}},
      {p + "attention.wk.weight", {2, 4}},
      {p + "attention.wv.weight", {2, 4}},
      {p + "attention.wo.weight", {4, 4}},
      {p + "feed_forward.w1.weight", {3, 4}},
      {p + "feed_forward.w2.weight", {4, 3}},
      {p + "feed_forward.w3.weight", {3, 4}},
      {p + "attention_norm.weight", {4}},
      {p + "ffn_norm.weight", {4}},
      {"norm.weight", {4}},
      {"output.weight", {5, 4}},
      {"rope.freqs", {1}}};
  size_t elements = 0;
  for (const TensorShape& s : shapes)
    elements += static_cast<size_t>(s.shape.front() *
                                    (s.shape.size() > 1 ? s.shape.back() : 1));
  const std::string params =
      R"({"dim": 4, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1,
          "norm_eps": 1e-5, "vocab_size": 5, "rope_theta": 10000.0,
          "use_scaled_rope": false, "multiple_of": 256, "head_dim": 2})";
  const testing::TempDir folder;
  testing::write_whole(folder.path() + "/params.json", params);
  fuzz_file(folder.path(), "consolidated.safetensors",
            safetensors_header(shapes, Dtype::kBf16) +
                std::string(2 * elements, '\x3f'));
  fuzz_file(folder.path(), "params.json", params);
}

TEST(HuggingFaceFuzz, Config) {
  std::vector<std::string> texts = {kOldConfig, kNewConfig};
  for (const geometry::ModelConfig& model : small_models())
    texts.push_back(config_json({.model = model}, Dtype::kBf16));
  fuzz(texts, 10000, [](const std::string& text) -> Status {
    ASSIGN_OR_RETURN(const Config c, parse_config(text, "config.json"));
    EXPECT_OK(c.model.validate());
    const auto again = parse_config(config_json(c, Dtype::kFp16), "written");
    EXPECT_OK(again);
    if (again.ok()) {
      EXPECT_EQ(again->model, c.model);
    }
    return ok_status();
  });
}

}  // namespace
}  // namespace remesh::huggingface
