#include "checkpoint/huggingface/model_folder.h"

#include <nlohmann/json.hpp>

#include "tests/testing/expect.h"
#include "tests/unit/huggingface/small_folder.h"

namespace remesh::huggingface {
namespace {

using Json = nlohmann::json;

Status open(const SmallFolder& f) {
  return ModelFolder::open(*posix_file_system(), f.path()).status();
}

#define EXPECT_REFUSED(folder, expected_code, text)      \
  do {                                                   \
    const Status s = open(folder);                       \
    EXPECT_EQ(s.code(), expected_code) << s.to_string(); \
    EXPECT_SAYS(s, text);                                \
  } while (0)

TEST(ModelFolder, ReadsAnyRectangle) {
  for (const Dtype d : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp16}) {
    const SmallFolder f(d);
    ASSERT_OK_AND(const auto folder,
                  ModelFolder::open(*posix_file_system(), f.path()));
    EXPECT_EQ(folder.config().model, f.table.config());
    for (size_t p = 0; p < f.table.size(); ++p) {
      Tensor whole{.dtype = d, .shape = f.shapes[p].shape};
      whole.bytes = std::as_bytes(std::span(f.tensors[p]));
      std::vector<float> all(static_cast<size_t>(whole.numel()));
      read_elements(whole, 0, all);
      const geometry::Rect full = geometry::full_rect(f.table[p]);
      const geometry::Rect part{full.rows / 2, 1, full.rows - full.rows / 2,
                                full.cols - 2};
      std::vector<float> out(static_cast<size_t>(part.rows * 100), -1);
      ASSERT_OK(folder.read(p, part, out.data(), 100));
      for (int64_t r = 0; r < part.rows; ++r)
        for (int64_t c = 0; c < part.cols; ++c)
          ASSERT_EQ(out[static_cast<size_t>(r * 100 + c)],
                    all[static_cast<size_t>((part.row + r) * full.cols +
                                            part.col + c)]);
      EXPECT_EQ(out[static_cast<size_t>(part.cols)], -1);
    }
  }
}

TEST(ModelFolder, AFileThatCannotBeReadAnyMoreIsNamed) {
  const SmallFolder f(Dtype::kFp32);
  ASSERT_OK_AND(const auto folder,
                ModelFolder::open(*posix_file_system(), f.path()));
  std::filesystem::resize_file(f.path() + "/model.safetensors", 0);
  const geometry::Rect all = geometry::full_rect(f.table[0]);
  std::vector<float> out(static_cast<size_t>(all.numel()));
  const Status s = folder.read(0, all, out.data(), all.cols);
  EXPECT_EQ(s.code(), Code::kIo);
  EXPECT_SAYS(s, "model.safetensors: cannot be read");
}

TEST(ModelFolder, FollowsTheIndexOfManyFiles) {
  const SmallFolder f(Dtype::kBf16);
  std::filesystem::remove(f.path() + "/model.safetensors");
  f.put_part("a.safetensors", 0, 5);
  f.put_part("b.safetensors", 5, f.shapes.size());
  Json map;
  for (size_t i = 0; i < f.shapes.size(); ++i)
    map[f.shapes[i].name] = i < 5 ? "a.safetensors" : "b.safetensors";
  const auto put_index = [&](const Json& m) {
    f.put("model.safetensors.index.json",
          Json{{"metadata", {{"total_size", 1}}}, {"weight_map", m}}.dump());
  };
  put_index(map);
  EXPECT_OK(open(f));

  Json changed = map;
  changed[f.shapes[0].name] = "b.safetensors";
  put_index(changed);
  EXPECT_REFUSED(f, Code::kCorrupt, "model.embed_tokens.weight");
  changed = map;
  changed.erase(f.shapes[6].name);
  put_index(changed);
  EXPECT_REFUSED(f, Code::kCorrupt, "does not name tensor");
  changed[f.shapes[6].name] = "../b.safetensors";
  put_index(changed);
  EXPECT_REFUSED(f, Code::kCorrupt, "its file must be a name");
  changed[f.shapes[6].name] = "c.safetensors";
  put_index(changed);
  EXPECT_REFUSED(f, Code::kCorrupt, "does not name tensor");
  changed = map;
  changed["more"] = "c.safetensors";
  put_index(changed);
  EXPECT_REFUSED(f, Code::kNotFound, "c.safetensors");
  put_index(Json::object());
  EXPECT_REFUSED(f, Code::kCorrupt, "weight_map");
}

// As transformers, which finds a model that was saved again as one file.
TEST(ModelFolder, TheOnlyFileCountsBeforeAnIndex) {
  const SmallFolder f(Dtype::kBf16);
  f.put("model.safetensors.index.json",
        Json{{"weight_map", {{f.shapes[0].name, "gone.safetensors"}}}}.dump());
  EXPECT_OK(open(f));
  std::filesystem::remove(f.path() + "/model.safetensors");
  EXPECT_REFUSED(f, Code::kNotFound, "gone.safetensors");
}

TEST(ModelFolder, RefusesTensorsThatAreNotTheModel) {
  SmallFolder f(Dtype::kFp16);
  const auto shapes = f.shapes;
  const auto tensors = f.tensors;
  f.shapes[1].name += "s";
  f.put_weights();
  EXPECT_REFUSED(f, Code::kInvalidArgument,
                 "\"model.layers.0.input_layernorm.weight\" is missing");
  f.shapes = shapes;
  f.shapes[2].shape = {4, 16};
  f.put_weights();
  EXPECT_REFUSED(f, Code::kInvalidArgument,
                 "has shape [4, 16]; the model's is [8, 8]");
  f.shapes = shapes;
  f.shapes.push_back({"model.layers.0.self_attn.q_proj.bias", {1}});
  f.tensors.emplace_back("xx");
  f.put_weights();
  EXPECT_REFUSED(f, Code::kInvalidArgument, "is no parameter of a llama model");
  f.shapes.back().name = "model.layers.1.self_attn.rotary_emb.inv_freq";
  f.put_weights();
  EXPECT_OK(open(f));
  std::filesystem::remove(f.path() + "/model.safetensors");
  EXPECT_REFUSED(f, Code::kNotFound,
                 "has neither model.safetensors nor "
                 "model.safetensors.index.json; files of PyTorch (.bin)");
  std::filesystem::remove(f.path() + "/config.json");
  EXPECT_REFUSED(f, Code::kNotFound, "has neither config.json nor params.json");
}

// As Phi3Attention and Phi3MLP of transformers take them apart: first the rows
// of the queries, then those of keys and values; first the gate, then up.
TEST(ModelFolder, ReadsPhi3AsTransformersWritesIt) {
  geometry::ModelConfig model = small_model();
  model.arch = "phi3";
  const SmallFolder f(Dtype::kFp16, model);
  std::vector<TensorShape> shapes;
  std::vector<std::string> tensors;
  const auto add = [&](const std::string& prefix, const std::string& name,
                       const std::vector<int64_t>& shape,
                       const std::vector<std::string>& parts) {
    shapes.push_back({prefix + name + ".weight", shape});
    tensors.emplace_back();
    for (const std::string& part : parts)
      tensors.back() += f.tensors[static_cast<size_t>(
          f.table.find(prefix + part + ".weight"))];
  };
  add("", "lm_head", {11, 8}, {"lm_head"});
  add("model.", "embed_tokens", {11, 8}, {"embed_tokens"});
  for (const std::string p : {"model.layers.0.", "model.layers.1."}) {
    add(p, "input_layernorm", {8}, {"input_layernorm"});
    add(p, "mlp.down_proj", {8, 12}, {"mlp.down_proj"});
    add(p, "mlp.gate_up_proj", {24, 8}, {"mlp.gate_proj", "mlp.up_proj"});
    add(p, "post_attention_layernorm", {8}, {"post_attention_layernorm"});
    add(p, "self_attn.o_proj", {8, 8}, {"self_attn.o_proj"});
    add(p, "self_attn.qkv_proj", {16, 8},
        {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"});
  }
  add("model.", "norm", {8}, {"norm"});
  f.put("model.safetensors", weights_file(shapes, tensors, f.dtype));
  expect_same(f, f.path());
}

TEST(ModelFolder, ATiedHeadMustEqualTheEmbedding) {
  geometry::ModelConfig model = small_model();
  model.tie_embeddings = true;
  SmallFolder f(Dtype::kBf16, model);
  EXPECT_OK(open(f));
  f.shapes.push_back({"lm_head.weight", f.shapes[0].shape});
  f.tensors.push_back(f.tensors[0]);
  f.put_weights();
  EXPECT_OK(open(f));
  f.tensors.back()[3] ^= 1;
  f.put_weights();
  EXPECT_REFUSED(f, Code::kInvalidArgument, "differs from the embedding");
}

}  // namespace
}  // namespace remesh::huggingface
