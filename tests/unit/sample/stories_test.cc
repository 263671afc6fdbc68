// The model that is shipped, against what its own program prints.

#include <string>

#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "worker/sample/choice.h"
#include "worker/sample/generator.h"

namespace remesh::sample {
namespace {

constexpr char kModel[] = "deploy/data/stories260k";
constexpr int32_t kBegin = 1;  // also what ends a text

TEST(Stories, GreedyTextIsThatOfTheReferenceProgram) {
  const auto fs = posix_file_system();
  const ModelFiles files = find_model(*fs, {.path = kModel}).value();
  EXPECT_EQ(files.begin, std::vector<int32_t>{kBegin});
  ASSERT_OK_AND(const auto weights, open_weights(*fs, files));
  const auto backend = kernels::make_cpu_backend(1);
  const auto model =
      Generator::load(weights, kernels::Dtype::kFp32, 257, *backend).value();
  std::string text;
  tokenizer::TextStream stream(*files.tokenizer);
  int32_t token = kBegin;
  int tokens = 0;
  for (; tokens < 256; ++tokens) {
    token = choose(model->extend({&token, 1}), {.temperature = 0}, 0);
    if (token == kBegin) break;
    ASSERT_OK(stream.add(token, text));
  }
  stream.finish(text);
  EXPECT_GT(tokens, 200);
  EXPECT_EQ(text + "\n",
            testing::read_whole(std::string(kModel) + "/greedy.txt"));
}

// What it was trained to continue is likely, and what is not English is not.
TEST(Stories, TheTokenizerIsTheModels) {
  const auto fs = posix_file_system();
  const ModelFiles files = find_model(*fs, {.path = kModel}).value();
  std::vector<int32_t> tokens;
  const std::string text = "Once upon a time, there was a dog €7.";
  ASSERT_OK(files.tokenizer->encode(text, {}, tokens));
  EXPECT_LT(tokens.size(), 30U);
  EXPECT_EQ(files.tokenizer->decode(tokens).value(), text);
}

}  // namespace
}  // namespace remesh::sample
