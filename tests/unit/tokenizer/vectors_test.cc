// The vectors of data/README.md, and real files that must load or be refused.
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/expect.h"
#include "tests/testing/temp_dir.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::tokenizer {
namespace {

// The path of a vocabulary; "" if it is not on this machine.
std::string vocabulary(const std::string& name) {
  const char* folder = std::getenv("REMESH_TOKENIZERS");
  if (folder == nullptr) return "";
  const std::string path = std::string(folder) + "/" + name;
  return std::filesystem::exists(path) ? path : "";
}

std::vector<std::string> texts() {
  const std::string mark = "\n__ggml_vocab_test__\n";
  std::string rest = read_whole("tests/unit/tokenizer/data/texts.inp");
  std::vector<std::string> texts;
  for (size_t at = rest.find(mark); at != std::string::npos;
       at = rest.find(mark)) {
    texts.push_back(rest.substr(0, at));
    rest.erase(0, at + mark.size());
  }
  return texts;
}

std::vector<std::vector<int32_t>> expected(const std::string& name) {
  std::ifstream in("tests/unit/tokenizer/data/" + name + ".out");
  std::vector<std::vector<int32_t>> all;
  for (std::string line; std::getline(in, line);) {
    std::istringstream numbers(line);
    std::vector<int32_t>& tokens = all.emplace_back();
    for (int32_t token = 0; numbers >> token;) tokens.push_back(token);
  }
  return all;
}

struct Vector {
  const char* file;
  const char* out;
};

class Vectors : public testing::TestWithParam<Vector> {};

TEST_P(Vectors, EveryTextHasThePublishedTokensAndComesBack) {
  const std::string path = vocabulary(GetParam().file);
  if (path.empty()) GTEST_SKIP() << "needs tokenizers: " << GetParam().file;
  ASSERT_OK_AND(const auto opened, open_tokenizer(path));
  const auto inputs = texts();
  const auto outputs = expected(GetParam().out);
  ASSERT_EQ(inputs.size(), 46U);
  ASSERT_GE(outputs.size(), inputs.size());
  int passed = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::vector<int32_t> tokens;
    ASSERT_OK(opened->encode(inputs[i], {}, tokens));
    EXPECT_EQ(tokens, outputs[i]) << i << ": '" << inputs[i] << "'";
    EXPECT_EQ(opened->decode(tokens).value(), inputs[i]);
    passed += tokens == outputs[i] ? 1 : 0;
  }
  fmt::print("{}: {} of {} vectors\n", GetParam().file, passed, inputs.size());
}

INSTANTIATE_TEST_SUITE_P(
    Published, Vectors,
    testing::Values(Vector{"llama3.tiktoken", "llama-bpe"},
                    Vector{"gpt2.tiktoken", "gpt-2"},
                    Vector{"phi-3/tokenizer.json", "llama-spm"},
                    Vector{"llama2/tokenizer.json", "llama-spm"},
                    Vector{"falcon/tokenizer.json", "falcon"},
                    Vector{"roberta/tokenizer.json", "roberta-bpe"},
                    Vector{"qwen2/tokenizer.json", "qwen2"}));

struct Example {
  const char* file;
  const char* text;
  std::vector<int32_t> tokens;
};

// From the tests of the projects that publish the files.
TEST(VectorExamples, AgreeWithTheirPublishers) {
  const std::vector<Example> examples = {
      {"llama3.tiktoken",
       "This is a test sentence.",
       {2028, 374, 264, 1296, 11914, 13}},
      {"llama3.tiktoken",
       "<|begin_of_text|>This is a test sentence.<|end_of_text|>",
       {128000, 2028, 374, 264, 1296, 11914, 13, 128001}},
      {"cl100k.tiktoken", "Hello \u2B50 World", {9906, 2928, 99834, 4435}},
      {"o200k.tiktoken",
       "<|endoftext|>Hello \u2B50 World<|endofprompt|>",
       {199999, 13225, 161181, 5922, 200018}},
  };
  int found = 0;
  for (const Example& e : examples) {
    const std::string path = vocabulary(e.file);
    if (path.empty()) continue;
    ++found;
    ASSERT_OK_AND(const auto opened, open_tokenizer(path));
    std::vector<int32_t> tokens;
    ASSERT_OK(opened->encode(e.text, {.special = true}, tokens));
    EXPECT_EQ(tokens, e.tokens) << e.file << ": " << e.text;
  }
  if (found == 0) GTEST_SKIP() << "needs tokenizers: llama3.tiktoken";
}

TEST(RealFiles, WhatIsNotSupportedIsRefusedByName) {
  const std::vector<std::pair<const char*, const char*>> files = {
      {"clip/tokenizer.json", R"(model: end_of_word_suffix "</w>")"},
      {"t5/tokenizer.json", R"(normalizer {"precompiled_charsmap":")"}};
  int found = 0;
  for (const auto& [file, message] : files) {
    const std::string path = vocabulary(file);
    if (path.empty()) continue;
    ++found;
    EXPECT_SAYS(open_tokenizer(path), message);
  }
  if (found == 0) GTEST_SKIP() << "needs tokenizers: clip, t5";
}

TEST(RealFiles, OtherFilesRoundTrip) {
  int found = 0;
  for (const char* file : {"phi-2", "whisper"}) {
    const std::string path = vocabulary(std::string(file) + "/tokenizer.json");
    if (path.empty()) continue;
    ++found;
    ASSERT_OK_AND(const auto opened, open_tokenizer(path));
    for (const std::string& text : texts()) {
      std::vector<int32_t> tokens;
      ASSERT_OK(opened->encode(text, {}, tokens));
      EXPECT_EQ(opened->decode(tokens).value(), text) << file;
    }
  }
  if (found == 0) GTEST_SKIP() << "needs tokenizers: phi-2, whisper";
}

}  // namespace
}  // namespace remesh::tokenizer
