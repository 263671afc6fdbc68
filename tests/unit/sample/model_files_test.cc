#include "worker/sample/model_files.h"

#include <filesystem>

#include "checkpoint/huggingface/transfer.h"
#include "checkpoint/manifest/manifest.h"
#include "tests/testing/expect.h"
#include "tests/unit/huggingface/small_folder.h"
#include "tests/unit/tokenizer/small_models.h"

namespace remesh::sample {
namespace {

using huggingface::SmallFolder;

class ModelFilesTest : public ::testing::Test {
 protected:
  Result<ModelFiles> find(const ModelChoice& choice) {
    return find_model(*fs_, choice);
  }
  std::string problem(const ModelChoice& choice) {
    return find(choice).status().message();
  }
  // A run directory with a folder of checkpoints, whose data are bytes.
  void make_run() {
    const std::string data = run_.path() + "/data";
    const std::string step = run_.path() + "/checkpoints/step-00000007";
    std::filesystem::create_directories(data);
    std::filesystem::create_directories(step);
    pb::Manifest m;
    m.set_format(manifest::kFormat);
    m.set_step(7);
    testing::write_whole(step + "/manifest.json", manifest::encode(m));
    testing::write_whole(
        run_.path() + "/job.toml",
        "[data]\npath = \"" + data + "\"\n[train]\nsteps = 10\nseq_len = 64\n");
  }
  std::unique_ptr<FileSystem> fs_ = posix_file_system();
  testing::TempDir run_;
};

TEST_F(ModelFilesTest, FindsAHuggingFaceFolder) {
  const SmallFolder folder(huggingface::Dtype::kFp32);
  folder.put("config.json",
             huggingface::config_json({.model = huggingface::small_model(),
                                       .max_position = 99,
                                       .bos_token_id = "3",
                                       .eos_token_id = "[4, 5]"},
                                      huggingface::Dtype::kFp32));
  EXPECT_HAS(problem({.path = folder.path()}), "no tokenizer is beside it");
  folder.put("tokenizer.json", tokenizer::byte_level().dump());
  ASSERT_OK_AND(const auto found, find({.path = folder.path()}));
  EXPECT_EQ(found.weights, folder.path());
  EXPECT_EQ(found.begin, std::vector<int32_t>{3});
  EXPECT_EQ(found.end, (std::set<int32_t>{4, 5, 258}));
  EXPECT_EQ(found.trained_length, 99);
  EXPECT_EQ(found.text_begin, std::vector<int32_t>{}) << "as GPT-2";
  // Its tokenizer may put a token in front of texts, and more may end them.
  tokenizer::Json json = tokenizer::byte_level();
  json["post_processor"] = {
      {"type", "Sequence"},
      {"processors",
       tokenizer::Json::array(
           {{{"type", "ByteLevel"}},
            {{"type", "TemplateProcessing"},
             {"single",
              tokenizer::Json::array({{{"SpecialToken", {{"id", "<s>"}}}},
                                      {{"Sequence", {{"id", "A"}}}}})}}})}};
  folder.put("tokenizer.json", json.dump());
  folder.put("generation_config.json", R"({"eos_token_id": [7, 4]})");
  const auto more = find({.path = folder.path()});
  EXPECT_EQ(more->text_begin, std::vector<int32_t>{3});
  EXPECT_EQ(more->end, (std::set<int32_t>{4, 5, 7, 258}));
  folder.put("tokenizer_config.json", R"({"add_bos_token": false})");
  EXPECT_EQ(find({.path = folder.path()})->text_begin, std::vector<int32_t>{});
  EXPECT_HAS(problem({.path = folder.path(), .step = 3}), "is no run");
}

// params.json names no tokens; the tokenizer has them.
TEST_F(ModelFilesTest, MetasModelsBeginTextsAsTheirTokenizer) {
  SmallFolder folder(huggingface::Dtype::kFp32);
  for (auto& shape : folder.shapes)
    shape.name = huggingface::meta_name(shape.name);
  folder.put_part("consolidated.safetensors", 0, folder.shapes.size());
  std::filesystem::remove(folder.path() + "/config.json");
  folder.put("params.json", R"({"dim": 8, "n_layers": 2, "n_heads": 4,
                                "n_kv_heads": 2, "norm_eps": 1e-5})");
  folder.put("tokenizer.model",
             tokenizer::small_sentencepiece().SerializeAsString());
  ASSERT_OK_AND(const auto found, find({.path = folder.path()}));
  EXPECT_EQ(found.begin, std::vector<int32_t>{1});
  EXPECT_EQ(found.text_begin, std::vector<int32_t>{1});
}

TEST_F(ModelFilesTest, AnImportedModelBeginsTextsAsItsTokenizer) {
  const SmallFolder model(huggingface::Dtype::kFp32);
  const testing::TempDir out;
  const std::string imported = out.path() + "/imported";
  ASSERT_OK(huggingface::import_model(
      *fs_, *huggingface::ModelFolder::open(*fs_, model.path()), imported,
      [](uint64_t, uint64_t) {}));
  const testing::TempDir folder;
  const auto put = [&](const std::string& name, const std::string& text) {
    testing::write_whole(folder.path() + "/" + name, text);
  };
  tokenizer::Json json = tokenizer::byte_level();
  json["added_tokens"].push_back(
      {{"id", 259}, {"content", "<s>"}, {"special", true}});
  json["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single", tokenizer::Json::array({{{"SpecialToken", {{"id", "<s>"}}}},
                                         {{"Sequence", {{"id", "A"}}}}})}};
  put("tokenizer.json", json.dump());
  using Tokens = std::vector<int32_t>;
  const auto begins = [&](const std::string& path, const Tokens& all,
                          const Tokens& prompt) {
    ASSERT_OK_AND(
        const auto found,
        find({.path = path, .tokenizer = folder.path() + "/tokenizer.json"}));
    EXPECT_EQ(found.begin, all);
    EXPECT_EQ(found.text_begin, prompt);
  };
  begins(imported, {259}, {259});
  begins(imported + "/step-00000000", {259}, {259});
  put("tokenizer_config.json",
      R"({"bos_token": {"content": "<|endoftext|>"}, "add_bos_token": false})");
  begins(imported, {258}, {});
  put("config.json", R"({"bos_token_id": 7})");
  begins(imported, {7}, {});
  put("config.json", R"({"bos_token_id": null})");
  begins(imported, {258}, {});  // the end of another text
  // What begins the texts that a run saw is not known without its job.
  make_run();
  std::filesystem::copy(run_.path() + "/checkpoints", out.path() + "/copies",
                        std::filesystem::copy_options::recursive);
  std::filesystem::remove(folder.path() + "/config.json");
  begins(out.path() + "/copies/step-00000007", {258}, {});
  // A run that continues the model.
  testing::write_whole(run_.path() + "/job.toml",
                       "[data]\npath = \"" + run_.path() +
                           "/data\"\n[model]\ninit_from = \"" + imported +
                           "\"\n[train]\nsteps = 10\nseq_len = 64\n");
  begins(run_.path(), {258}, {});
}

TEST_F(ModelFilesTest, FindsTheModelOfARun) {
  make_run();
  ASSERT_OK_AND(const auto found,
                find({.path = run_.path(), .tokenizer = "bytes"}));
  EXPECT_EQ(found.weights, run_.path() + "/checkpoints");
  EXPECT_EQ(found.begin, std::vector<int32_t>{tokenizer::kByteEndOfText});
  EXPECT_EQ(found.trained_length, 64);
  ASSERT_OK_AND(const auto step,
                find({.path = run_.path(), .step = 7, .tokenizer = "bytes"}));
  EXPECT_EQ(step.weights, run_.path() + "/checkpoints/step-00000007");
  // Its checkpoint by name has the same tokenizer.
  ASSERT_OK_AND(const auto checkpoint,
                find({.path = step.weights, .tokenizer = "bytes"}));
  EXPECT_EQ(checkpoint.weights, step.weights);
  EXPECT_EQ(checkpoint.begin, found.begin);
  EXPECT_HAS(problem({.path = run_.path(), .step = 8, .tokenizer = "bytes"}),
             "checkpoints: no checkpoint of step 8; available: 7");
  EXPECT_HAS(problem({.path = ""}), "MODEL: must not be empty");
}

// A job file in a folder above does not make it part of a run.
TEST_F(ModelFilesTest, AModelBesideARunIsNotTheRuns) {
  make_run();
  const std::string tuned = run_.path() + "/tuned";
  const SmallFolder folder(huggingface::Dtype::kFp32);
  folder.put("tokenizer.json", tokenizer::byte_level().dump());
  std::filesystem::create_directories(tuned);
  std::filesystem::copy(folder.path(), tuned + "/model");
  std::filesystem::copy(run_.path() + "/checkpoints", tuned + "/copies",
                        std::filesystem::copy_options::recursive);
  ASSERT_OK_AND(const auto model, find({.path = tuned + "/model"}));
  EXPECT_EQ(model.tokenizer->vocab_size(), 259);
  ASSERT_OK_AND(const auto copy, find({.path = tuned + "/copies/step-00000007",
                                       .tokenizer = "bytes"}));
  EXPECT_EQ(copy.trained_length, 0);
}

TEST_F(ModelFilesTest, TakesTheTokenizerThatCanBeRead) {
  const SmallFolder folder(huggingface::Dtype::kFp32);
  folder.put("tokenizer.json", R"({"model": {"type": "Unigram"}})");
  const std::string alone = problem({.path = folder.path()});
  EXPECT_HAS(alone, "Unigram");
  folder.put("tokenizer.model", "\nnothing");
  EXPECT_HAS(problem({.path = folder.path()}), alone + "; ");
  EXPECT_HAS(problem({.path = folder.path()}), "/tokenizer.model");
  folder.put("tokenizer.model",
             tokenizer::small_sentencepiece().SerializeAsString());
  ASSERT_OK_AND(const auto found, find({.path = folder.path()}));
  EXPECT_EQ(found.folder, folder.path());
  folder.put("tokenizer.model", "\nnothing");
  folder.put("tokenizer.json", tokenizer::byte_level().dump());
  EXPECT_OK(find({.path = folder.path()}));
}

TEST_F(ModelFilesTest, NamesWhatIsMissing) {
  EXPECT_EQ(problem({.path = "/nowhere"}), "/nowhere: there is no such file");
}

// Before a tokenizer is asked for, which would be no help.
TEST_F(ModelFilesTest, AFolderWithoutAModelIsNamedAtOnce) {
  const testing::TempDir folder;
  const std::string& path = folder.path();
  const std::string allowed =
      "; give a run directory, a checkpoint or a folder of checkpoints, or a "
      "folder of Hugging Face (with config.json)";
  EXPECT_EQ(problem({.path = path}), path + ": has no model" + allowed);
  EXPECT_EQ(find({.path = path}).status().code(), Code::kNotFound);
  testing::write_whole(path + "/dataset.json", "{}");
  EXPECT_EQ(problem({.path = path}),
            path + ": is a data set, not a model" + allowed);
  EXPECT_EQ(problem({.path = path, .tokenizer = "bytes"}),
            path + ": is a data set, not a model" + allowed);
  const std::string text = path + "/text.txt";
  testing::write_whole(text, "text");
  EXPECT_EQ(problem({.path = text}), text + ": has no model" + allowed);
  // A folder of checkpoints of which none is valid.
  std::filesystem::create_directories(path + "/step-00000007");
  EXPECT_HAS(problem({.path = path}), allowed);
}

}  // namespace
}  // namespace remesh::sample
