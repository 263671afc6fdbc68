#include "checkpoint/huggingface/transfer.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/huggingface/weight_source.h"
#include "parallel/geometry/lora.h"
#include "tests/testing/expect.h"
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

Result<store::CommitResult> import_small(FileSystem& fs, const SmallFolder& f,
                                         const std::string& out) {
  const auto system = posix_file_system();
  ASSIGN_OR_RETURN(const auto model, ModelFolder::open(*system, f.path()));
  return import_model(fs, model, out, kSilent);
}

TEST(Transfer, ImportThenExportIsBitIdentical) {
  for (geometry::ModelConfig model : small_models())
    for (const Dtype d : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp16}) {
      SCOPED_TRACE(model.arch);
      model.tie_embeddings = !model.tie_embeddings;
      const SmallFolder f(d, model);
      MemoryFileSystem fs;
      ASSERT_OK_AND(const auto imported, import_small(fs, f, "c"));
      EXPECT_EQ(imported.path, "c/step-00000000");
      ASSERT_OK_AND(const auto exported, export_model(fs, imported.path, "hf",
                                                      {.dtype = d}, kSilent));
      EXPECT_EQ(exported.files, 1);
      EXPECT_EQ(get(fs, "hf/model.safetensors"),
                testing::read_whole(f.path() + "/model.safetensors"));
      ASSERT_OK_AND(const auto config, read_config(fs, "hf"));
      EXPECT_EQ(config.model, model);
    }
}

// Phi-3 has q, k, v as one tensor, and gate, up.
TEST(Transfer, FusedTensorsStayInOneFile) {
  geometry::ModelConfig model = small_model();
  model.arch = "phi3";
  const SmallFolder f(Dtype::kBf16, model);
  std::vector<TensorShape> shapes;
  for (const FileTensor& t : file_tensors(f.table)) shapes.push_back(t.tensor);
  EXPECT_EQ(shapes[2].name, "model.layers.0.self_attn.qkv_proj.weight");
  EXPECT_EQ(shapes[2].shape, (std::vector<int64_t>{16, 8}));
  EXPECT_EQ(shapes[5].name, "model.layers.0.mlp.gate_up_proj.weight");
  EXPECT_EQ(shapes[5].shape, (std::vector<int64_t>{24, 8}));
  MemoryFileSystem fs;
  ASSERT_OK_AND(const auto imported, import_small(fs, f, "c"));
  // A file never ends inside a tensor.
  ASSERT_OK(
      export_model(fs, imported.path, "parts", {.shard_bytes = 200}, kSilent));
  const std::string index = get(fs, "parts/model.safetensors.index.json");
  EXPECT_HAS(index, "qkv_proj");
  EXPECT_LACKS(index, "k_proj.weight");
}

TEST(Transfer, ManyFilesHoldTheSameTensors) {
  const SmallFolder f(Dtype::kBf16);
  MemoryFileSystem fs;
  ASSERT_OK_AND(const auto imported, import_small(fs, f, "c"));
  ASSERT_OK_AND(
      const auto exported,
      export_model(fs, imported.path, "hf", {.shard_bytes = 300}, kSilent));
  EXPECT_GT(exported.files, 3);
  const auto index =
      nlohmann::json::parse(get(fs, "hf/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 2 * f.table.num_elements());
  // Read as another program would.
  const testing::TempDir dir;
  const auto names = fs.list("hf");
  for (const std::string& name : *names)
    testing::write_whole(dir.path() + "/" + name, get(fs, "hf/" + name));
  expect_same(f, dir.path());
}

TEST(Transfer, ExportsWhatAnyNumberOfRanksSaved) {
  const auto table = geometry::ParamTable::make(small_model());
  const store::State state = store::random_state(table.num_elements(), 3);
  std::string first;
  for (const int ranks : {1, 2, 5}) {
    MemoryFileSystem fs;
    ASSERT_OK_AND(const auto saved,
                  store::save(fs, "c", {7, 1}, table, state, ranks));
    ASSERT_OK_AND(
        const auto done,
        export_model(fs, saved.path, "hf", {.dtype = Dtype::kFp32}, kSilent));
    EXPECT_EQ(done.step, 7);
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

// As retention does it, between two blocks of the export.
TEST(Transfer, ExportsToItsEndWhatIsRemovedMeanwhile) {
  const auto table = geometry::ParamTable::make(small_model());
  const store::State state = store::random_state(table.num_elements(), 3);
  MemoryFileSystem fs;
  ASSERT_OK_AND(const auto saved,
                store::save(fs, "c", {7, 1}, table, state, 3));
  const ExportOptions options = {.dtype = Dtype::kFp32, .shard_bytes = 300};
  ASSERT_OK(export_model(fs, saved.path, "before", options, kSilent));
  int blocks = 0;
  ASSERT_OK(
      export_model(fs, saved.path, "hf", options, [&](uint64_t, uint64_t) {
        if (++blocks > 1) return;
        ASSERT_OK(fs.rename(saved.path, "c/old"));
        ASSERT_OK(remove_all(fs, "c/old"));
      }));
  EXPECT_GT(blocks, 3);
  ASSERT_OK_AND(const auto names, fs.list("before"));
  for (const std::string& name : names)
    EXPECT_EQ(get(fs, "hf/" + name), get(fs, "before/" + name)) << name;
}

TEST(Transfer, AWeightThatTheTypeCannotHoldIsRefused) {
  const auto table = geometry::ParamTable::make(small_model());
  store::State state(table.num_elements(), 0.5F);
  MemoryFileSystem fs;
  int saves = 0;
  const auto refused = [&](float value, Dtype d) {
    state.weights.back() = value;
    const std::string name = std::to_string(++saves);
    const auto saved = store::save(fs, "c" + name, {7, 1}, table, state, 2);
    CHECK(saved.ok());
    const auto done =
        export_model(fs, saved->path, "hf" + name, {.dtype = d}, kSilent);
    EXPECT_EQ(done.ok(), fs.exists("hf" + name));
    return done.status().message();
  };
  EXPECT_EQ(refused(65519, Dtype::kFp16), "");  // becomes 65504
  EXPECT_EQ(refused(-65520, Dtype::kFp16),
            "tensor \"lm_head.weight\" has the value -65520, which is too "
            "large for fp16");
  EXPECT_EQ(refused(-65520, Dtype::kBf16), "");
  EXPECT_NE(refused(3.4e38F, Dtype::kBf16), "");
  EXPECT_EQ(refused(3.4e38F, Dtype::kFp32), "");
}

// The base and adapters of it, saved by several ranks; values of both.
struct Adapted {
  Adapted() {
    geometry::ModelConfig config = small_model();
    config.lora = {.rank = 2, .alpha = 3, .targets = {"q_proj", "down_proj"}};
    adapters = geometry::ParamTable::make(config);
    for (int64_t i = 0; i < base.num_elements(); ++i)
      weights.weights[static_cast<size_t>(i)] = static_cast<float>(i % 7 - 3);
    deltas = store::State(adapters.num_elements());
    for (int64_t i = 0; i < adapters.num_elements(); ++i)
      deltas.weights[static_cast<size_t>(i)] = static_cast<float>(i % 5 - 2);
    CHECK(store::save(fs, "b", {0, 1}, base, weights, 1).ok());
    const auto saved = store::save(fs, "a", {7, 1}, adapters, deltas, 3);
    CHECK(saved.ok());
    path = saved->path;
  }
  // Element (row, col) of base parameter i, with what is added to it.
  double sum(size_t i, int64_t row, int64_t col) const {
    const auto& shape = base[i].shape;
    double out = weights.weights[static_cast<size_t>(base.offset(i) +
                                                     row * shape.back() + col)];
    if (!has_adapter(base[i], adapters.config().lora)) return out;
    const auto a =
        static_cast<size_t>(adapters.find(base[i].role, base[i].layer));
    for (int64_t k = 0; k < 2; ++k)
      out += 1.5 *
             deltas.weights[static_cast<size_t>(adapters.offset(a + 1) +
                                                row * 2 + k)] *
             deltas.weights[static_cast<size_t>(adapters.offset(a) +
                                                k * shape[1] + col)];
    return out;
  }
  MemoryFileSystem fs;
  geometry::ParamTable base = geometry::ParamTable::make(small_model());
  geometry::ParamTable adapters;
  store::State weights{base.num_elements()}, deltas;
  std::string path;
};

TEST(Transfer, AdaptersAreAddedToTheirBase) {
  Adapted m;
  EXPECT_SAYS(export_model(m.fs, m.path, "hf", {}, kSilent),
              "has adapters alone, and not the model that they belong to");
  ASSERT_OK_AND(const auto done,
                export_model(m.fs, m.path, "hf",
                             {.dtype = Dtype::kFp32, .base = "b"}, kSilent));
  EXPECT_EQ(done.model, small_model());
  EXPECT_EQ(done.parameters, m.base.num_elements());
  const std::string file = get(m.fs, "hf/model.safetensors");
  ASSERT_OK_AND(const auto tensors,
                parse_safetensors(std::as_bytes(std::span(file)), "hf"));
  std::vector<float> got;
  for (size_t i = 0; i < m.base.size(); ++i) {
    got.resize(static_cast<size_t>(m.base[i].numel()));
    read_elements(tensors.at(m.base[i].name), 0, got);
    const int64_t columns = m.base[i].shape.back();
    for (int64_t e = 0; e < m.base[i].numel(); ++e)
      ASSERT_EQ(got[static_cast<size_t>(e)], m.sum(i, e / columns, e % columns))
          << m.base[i].name;
  }
}

TEST(Transfer, AdaptersAreNotAddedToOtherWeights) {
  Adapted m;
  const std::string base = "b/step-00000000";
  ASSERT_OK_AND(const auto print,
                WeightSource::open(m.fs, base)->fingerprint([] {}));
  pb::Manifest manifest = *manifest::read_manifest(m.fs, m.path);
  manifest.set_base(base);
  manifest.set_base_fingerprint(print);
  ASSERT_OK(write_file(m.fs, path_join(m.path, manifest::kManifestName),
                       manifest::encode(manifest)));
  const auto exported = [&](const std::string& out, const std::string& from) {
    return export_model(m.fs, m.path, out, {.base = from}, kSilent).status();
  };
  EXPECT_OK(exported("at-its-place", ""));
  // The same weights that three ranks saved, and others of the same shape.
  ASSERT_OK(store::save(m.fs, "same", {0, 1}, m.base, m.weights, 3));
  m.weights.weights[5] += 1;
  ASSERT_OK(store::save(m.fs, "other", {0, 1}, m.base, m.weights, 1));
  EXPECT_OK(exported("elsewhere", "same"));
  const Status refused = exported("wrong", "other");
  EXPECT_EQ(refused.code(), Code::kCorrupt) << refused.to_string();
  for (const std::string& part :
       {m.path,
        std::string("other/step-00000000: its weights are not those of "
                    "the model that the adapters belong to"),
        "was at " + base + " (fingerprint " + print,
        std::string("put that model back")})
    EXPECT_SAYS(refused, part);
  EXPECT_FALSE(m.fs.exists("wrong"));
}

TEST(Transfer, AdaptersThatBelongToThemselvesAreRefused) {
  Adapted m;
  pb::Manifest manifest = *manifest::read_manifest(m.fs, m.path);
  manifest.set_base(m.path);
  manifest.clear_base_fingerprint();
  ASSERT_OK(write_file(m.fs, path_join(m.path, manifest::kManifestName),
                       manifest::encode(manifest)));
  const Status refused = WeightSource::open(m.fs, m.path).status();
  EXPECT_EQ(refused.code(), Code::kCorrupt);
  EXPECT_SAYS(refused, "belong to adapters");
}

// Each element of a small parameter counts, and of a large one those from its
// first to its last; neither files nor types do.
TEST(Transfer, AFingerprintIsThatOfTheWeights) {
  geometry::ModelConfig model = small_model();
  model.vocab_size = 5000;
  SmallFolder f(Dtype::kBf16, model);
  const auto system = posix_file_system();
  const auto here = [&] {
    return WeightSource::open(*system, f.path())->fingerprint([] {}).value();
  };
  const std::string first = here();
  EXPECT_EQ(first.size(), 32u);
  MemoryFileSystem fs;
  ASSERT_OK(import_small(fs, f, "c"));
  EXPECT_EQ(WeightSource::open(fs, "c")->fingerprint([] {}).value(), first);
  for (std::string& tensor : f.tensors)
    for (const size_t at : {size_t{0}, tensor.size() - 2}) {
      tensor[at] ^= 1;
      f.put_weights();
      EXPECT_NE(here(), first);
      tensor[at] ^= 1;
    }
  f.put_weights();
  EXPECT_EQ(here(), first);
}

// Of a mapped file, in this process.
int64_t resident_kib(const std::string& path) {
  std::ifstream maps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.ends_with(path)) here = true;
    if (here && line.starts_with("Rss:")) return std::stoll(line.substr(4));
  }
  return -1;
}

TEST(Transfer, WhatWasReadOfAFileDoesNotStayInMemory) {
  const SmallFolder f(Dtype::kFp32);
  const auto fs = posix_file_system();
  ASSERT_OK_AND(const auto source, WeightSource::open(*fs, f.path()));
  EXPECT_GT(resident_kib(f.path() + "/model.safetensors"), 0);
  std::vector<float> weights(static_cast<size_t>(f.table.num_elements()));
  ASSERT_OK(
      source.load(f.table, geometry::whole_pieces(f.table), weights, [] {}));
  EXPECT_EQ(resident_kib(f.path() + "/model.safetensors"), 0);
}

TEST(Transfer, AdaptersAloneAreFilesOfPeft) {
  Adapted m;
  ASSERT_OK_AND(
      const auto done,
      export_model(m.fs, m.path, "peft",
                   {.dtype = Dtype::kFp32, .base = "b", .adapters = true},
                   kSilent));
  EXPECT_EQ(done.parameters, m.adapters.num_elements());
  const auto config =
      nlohmann::json::parse(get(m.fs, "peft/adapter_config.json"));
  EXPECT_EQ(config["peft_type"], "LORA");
  EXPECT_EQ(config["base_model_name_or_path"], "b");
  EXPECT_EQ(config["r"], 2);
  EXPECT_EQ(config["lora_alpha"], 3);
  EXPECT_EQ(config["target_modules"],
            (std::vector<std::string>{"q_proj", "down_proj"}));
  const std::string file = get(m.fs, "peft/adapter_model.safetensors");
  ASSERT_OK_AND(const auto tensors,
                parse_safetensors(std::as_bytes(std::span(file)), "p"));
  ASSERT_EQ(tensors.size(), m.adapters.size());
  const Tensor& b =
      tensors.at("base_model.model.model.layers.1.mlp.down_proj.lora_B.weight");
  EXPECT_EQ(b.shape, (std::vector<int64_t>{8, 2}));
  std::vector<float> got(16);
  read_elements(b, 0, got);
  EXPECT_TRUE(std::equal(got.begin(), got.end(), m.deltas.weights.end() - 16));
  EXPECT_FALSE(export_model(m.fs, "b", "no", {.adapters = true}, kSilent).ok());
}

TEST(Transfer, TakesOverWhatDescribesText) {
  const SmallFolder f(Dtype::kBf16);
  MemoryFileSystem fs;
  ASSERT_OK_AND(const auto imported, import_small(fs, f, "c"));
  ASSERT_OK(fs.create_dirs("like"));
  ASSERT_OK(write_file(fs, "like/config.json",
                       config_json({.model = small_model(),
                                    .max_position = 777,
                                    .eos_token_id = "[2,3]"},
                                   Dtype::kFp32)));
  ASSERT_OK(write_file(fs, "like/tokenizer.json", "{\"x\": 1}"));
  const std::string tools = "additional_chat_templates/tool_use.jinja";
  ASSERT_OK(fs.create_dirs("like/additional_chat_templates"));
  ASSERT_OK(write_file(fs, "like/" + tools, "{{ tools }}"));
  ASSERT_OK(export_model(fs, imported.path, "hf", {.like = "like"}, kSilent));
  EXPECT_EQ(get(fs, "hf/tokenizer.json"), "{\"x\": 1}");
  EXPECT_EQ(get(fs, "hf/" + tools), "{{ tools }}");
  ASSERT_OK_AND(const auto config, read_config(fs, "hf"));
  EXPECT_EQ(config.max_position, 777);
  EXPECT_EQ(config.eos_token_id, "[2,3]");
  const std::string generation = "generation_config.json";
  EXPECT_EQ(nlohmann::json::parse(get(fs, "hf/" + generation)),
            nlohmann::json::parse(
                R"({"_from_model_config": true, "eos_token_id": [2, 3]})"));
  // Its own is copied.
  ASSERT_OK(write_file(fs, "like/" + generation, R"({"top_p": 0.9})"));
  ASSERT_OK(export_model(fs, imported.path, "hf2", {.like = "like"}, kSilent));
  EXPECT_EQ(get(fs, "hf2/" + generation), R"({"top_p": 0.9})");
  ASSERT_OK(export_model(fs, imported.path, "hf3", {}, kSilent));
  EXPECT_FALSE(fs.exists("hf3/" + generation));
}

TEST(Transfer, TakesNothingFromAnotherModel) {
  const SmallFolder f(Dtype::kBf16);
  MemoryFileSystem fs;
  ASSERT_OK_AND(const auto imported, import_small(fs, f, "c"));
  ASSERT_OK(fs.create_dirs("like"));
  const auto refused = [&](geometry::ModelConfig other) {
    CHECK(write_file(fs, "like/config.json",
                     config_json({.model = std::move(other)}, Dtype::kFp32))
              .ok());
    const auto done =
        export_model(fs, imported.path, "hf", {.like = "like"}, kSilent);
    EXPECT_EQ(done.status().code(), Code::kInvalidArgument);
    EXPECT_FALSE(fs.exists("hf"));
    return done.status().message();
  };
  geometry::ModelConfig other = small_model();
  other.vocab_size = 12;
  EXPECT_EQ(refused(other),
            "like/config.json: is of another model: vocab_size is 12, here 11");
  other.dim = 16;
  other.n_layers = 3;
  other.arch = "qwen2";
  for (const char* part :
       {"model_type is qwen2, here llama", "hidden_size is 16, here 8",
        "num_hidden_layers is 3, here 2"})
    EXPECT_HAS(refused(other), part);
}

TEST(Transfer, LeavesWhatIsThereAlone) {
  const SmallFolder f(Dtype::kBf16);
  MemoryFileSystem fs;
  ASSERT_OK_AND(const auto imported, import_small(fs, f, "c"));
  EXPECT_EQ(import_small(fs, f, "c").status().code(), Code::kAlreadyExists);
  EXPECT_EQ(export_model(fs, imported.path, "c", {}, kSilent).status().code(),
            Code::kAlreadyExists);
}

// At whichever call the disk fails or the process is killed, the result is
// complete or absent, and a second attempt succeeds and leaves nothing else.
TEST(Transfer, AFailureLeavesNothingHalfWritten) {
  const SmallFolder f(Dtype::kBf16);
  MemoryFileSystem before;
  ASSERT_OK_AND(const auto imported, import_small(before, f, "c"));
  const auto run_import = [&](FileSystem& fs) {
    return import_small(fs, f, "d").status();
  };
  const auto run_export = [&](FileSystem& fs) {
    return export_model(fs, imported.path, "hf", {.shard_bytes = 600}, kSilent)
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
        ASSERT_OK(run(*left)) << call;
        ASSERT_OK_AND(const auto names, left->list("."));
        EXPECT_EQ(names, (std::vector<std::string>{"c", parent_path(result)}));
      }
    }
  };
  check(run_import, "d/step-00000000");
  check(run_export, "hf/config.json");
}

}  // namespace
}  // namespace remesh::huggingface
