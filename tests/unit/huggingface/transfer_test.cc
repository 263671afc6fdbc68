#include "checkpoint/huggingface/transfer.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/testing/memory_file_system.h"
#include "tests/unit/checkpoint/fixture.h"
#include "tests/unit/huggingface/small_folder.h"

namespace remesh::huggingface {
namespace {

const auto kSilent = [](uint64_t, uint64_t) {};

std::string get(FileSystem& fs, const std::string& path) {
  const auto text = read_file(fs, path, uint64_t{1} << 30);
  return text.ok() ? *text : text.status().to_string();
}

Result<store::Committed> import_small(FileSystem& fs, const SmallFolder& f,
                                      const std::string& out) {
  const auto system = posix_file_system();
  ASSIGN_OR_RETURN(const auto model, ModelFolder::open(*system, f.path()));
  return import_model(fs, model, out, kSilent);
}

TEST(Transfer, ImportThenExportIsBitIdentical) {
  for (const bool tied : {false, true})
    for (const Dtype d : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp16}) {
      geometry::ModelConfig model = small_model();
      model.tie_embeddings = tied;
      const SmallFolder f(d, model);
      MemoryFileSystem fs;
      const auto imported = import_small(fs, f, "c");
      ASSERT_TRUE(imported.ok()) << imported.status().to_string();
      EXPECT_EQ(imported->path, "c/step-00000000");
      const auto exported =
          export_model(fs, imported->path, "hf", {.dtype = d}, kSilent);
      ASSERT_TRUE(exported.ok()) << exported.status().to_string();
      EXPECT_EQ(exported->files, 1);
      EXPECT_EQ(get(fs, "hf/model.safetensors"),
                weights_file(f.shapes, f.tensors, d));
      const auto config = read_config(fs, "hf");
      ASSERT_TRUE(config.ok()) << config.status().to_string();
      EXPECT_EQ(config->model, model);
    }
}

// Phi-3 has q, k, v as one tensor, and gate, up.
TEST(Transfer, FusedTensorsComeInAndGoOut) {
  geometry::ModelConfig model = small_model();
  model.arch = "phi3";
  const SmallFolder f(Dtype::kBf16, model);
  std::vector<TensorShape> shapes;
  for (const FileTensor& t : file_tensors(f.table)) shapes.push_back(t.tensor);
  EXPECT_EQ(shapes[2].name, "model.layers.0.self_attn.qkv_proj.weight");
  EXPECT_EQ(shapes[2].shape, (std::vector<int64_t>{16, 8}));
  EXPECT_EQ(shapes[5].name, "model.layers.0.mlp.gate_up_proj.weight");
  EXPECT_EQ(shapes[5].shape, (std::vector<int64_t>{24, 8}));
  const std::string file = weights_file(shapes, f.tensors, f.dtype);
  f.put("model.safetensors", file);
  MemoryFileSystem fs;
  const auto imported = import_small(fs, f, "c");
  ASSERT_TRUE(imported.ok()) << imported.status().to_string();
  const auto whole = export_model(fs, imported->path, "hf", {}, kSilent);
  ASSERT_TRUE(whole.ok()) << whole.status().to_string();
  EXPECT_EQ(get(fs, "hf/model.safetensors"), file);
  // A file never ends inside a tensor.
  const auto parts =
      export_model(fs, imported->path, "parts", {.shard_bytes = 200}, kSilent);
  ASSERT_TRUE(parts.ok()) << parts.status().to_string();
  const std::string index = get(fs, "parts/model.safetensors.index.json");
  EXPECT_NE(index.find("qkv_proj"), std::string::npos);
  EXPECT_EQ(index.find("k_proj.weight"), std::string::npos);
}

TEST(Transfer, ManyFilesHoldTheSameTensors) {
  const SmallFolder f(Dtype::kBf16);
  MemoryFileSystem fs;
  const auto imported = import_small(fs, f, "c");
  ASSERT_TRUE(imported.ok()) << imported.status().to_string();
  const auto exported =
      export_model(fs, imported->path, "hf", {.shard_bytes = 300}, kSilent);
  ASSERT_TRUE(exported.ok()) << exported.status().to_string();
  EXPECT_GT(exported->files, 3);
  const auto index =
      nlohmann::json::parse(get(fs, "hf/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 2 * f.table.num_elements());
  // Read as another program would.
  const testing::TempDir dir;
  const auto names = fs.list("hf");
  for (const std::string& name : *names)
    testing::write_whole(dir.path() + "/" + name, get(fs, "hf/" + name));
  const auto again = ModelFolder::open(*posix_file_system(), dir.path());
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  std::vector<float> values;
  for (size_t p = 0; p < f.table.size(); ++p) {
    const geometry::Rect all = geometry::full_rect(f.table[p]);
    values.resize(static_cast<size_t>(all.numel()));
    again->read(p, all, values.data(), all.cols);
    std::string bytes(f.tensors[p].size(), '\0');
    write_elements(Dtype::kBf16, values,
                   std::as_writable_bytes(std::span(bytes)));
    EXPECT_EQ(bytes, f.tensors[p]) << f.shapes[p].name;
  }
}

TEST(Transfer, ExportsWhatAnyNumberOfRanksSaved) {
  const auto table = geometry::ParamTable::make(small_model());
  const store::State state = store::random_state(table.num_elements(), 3);
  std::string first;
  for (const int ranks : {1, 2, 5}) {
    MemoryFileSystem fs;
    const auto saved = store::save(fs, "c", {7, 1}, table, state, ranks);
    ASSERT_TRUE(saved.ok()) << saved.status().to_string();
    const auto done =
        export_model(fs, saved->path, "hf", {.dtype = Dtype::kFp32}, kSilent);
    ASSERT_TRUE(done.ok()) << done.status().to_string();
    EXPECT_EQ(done->step, 7);
    const std::string file = get(fs, "hf/model.safetensors");
    if (first.empty()) first = file;
    EXPECT_EQ(file, first);
    const size_t bytes = state.weights.size() * sizeof(float);
    ASSERT_GT(file.size(), bytes);
    EXPECT_EQ(std::memcmp(file.data() + file.size() - bytes,
                          state.weights.data(), bytes),
              0);
  }
}

TEST(Transfer, TakesOverWhatDescribesText) {
  const SmallFolder f(Dtype::kBf16);
  MemoryFileSystem fs;
  const auto imported = import_small(fs, f, "c");
  ASSERT_TRUE(imported.ok()) << imported.status().to_string();
  ASSERT_TRUE(fs.create_dirs("like").ok());
  ASSERT_TRUE(write_file(fs, "like/config.json",
                         config_json({.model = small_model(),
                                      .max_position = 777,
                                      .eos_token_id = "[2,3]"},
                                     Dtype::kFp32))
                  .ok());
  ASSERT_TRUE(write_file(fs, "like/tokenizer.json", "{\"x\": 1}").ok());
  const auto done =
      export_model(fs, imported->path, "hf", {.like = "like"}, kSilent);
  ASSERT_TRUE(done.ok()) << done.status().to_string();
  EXPECT_EQ(get(fs, "hf/tokenizer.json"), "{\"x\": 1}");
  const auto config = read_config(fs, "hf");
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->max_position, 777);
  EXPECT_EQ(config->eos_token_id, "[2,3]");
}

TEST(Transfer, LeavesWhatIsThereAlone) {
  const SmallFolder f(Dtype::kBf16);
  MemoryFileSystem fs;
  const auto imported = import_small(fs, f, "c");
  ASSERT_TRUE(imported.ok()) << imported.status().to_string();
  EXPECT_EQ(import_small(fs, f, "c").status().code(), Code::kAlreadyExists);
  EXPECT_EQ(export_model(fs, imported->path, "c", {}, kSilent).status().code(),
            Code::kAlreadyExists);
}

// At whichever call the disk fails or the process is killed, the result is
// complete or absent, and a second attempt succeeds and leaves nothing else.
TEST(Transfer, AFailureLeavesNothingHalfWritten) {
  const SmallFolder f(Dtype::kBf16);
  MemoryFileSystem before;
  const auto imported = import_small(before, f, "c");
  ASSERT_TRUE(imported.ok()) << imported.status().to_string();
  const auto run_import = [&](FileSystem& fs) {
    return import_small(fs, f, "d").status();
  };
  const auto run_export = [&](FileSystem& fs) {
    return export_model(fs, imported->path, "hf", {.shard_bytes = 600}, kSilent)
        .status();
  };
  const auto check = [&](const auto& run, const std::string& result) {
    for (const auto fault :
         {MemoryFileSystem::Fault::kIoOnce, MemoryFileSystem::Fault::kFull,
          MemoryFileSystem::Fault::kCrash}) {
      bool failed = true;
      for (int64_t call = 0; failed; ++call) {
        const auto fs = before.clone();
        fs->fail_at(call, fault);
        const Status status = run(*fs);
        failed = !status.ok();
        ASSERT_LT(call, 10000);
        if (!failed) break;
        const auto left = fs->clone();
        if (left->exists(result)) continue;  // the last steps only sync
        const Status again = run(*left);
        ASSERT_TRUE(again.ok()) << call << ": " << again.to_string();
        const auto names = left->list(".");
        ASSERT_TRUE(names.ok());
        EXPECT_EQ(*names, (std::vector<std::string>{"c", parent_path(result)}));
      }
    }
  };
  check(run_import, "d/step-00000000");
  check(run_export, "hf/config.json");
}

}  // namespace
}  // namespace remesh::huggingface
