#include "worker/sample/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/testing/expect.h"
#include "tests/unit/sample/small_generator.h"

namespace remesh::sample {
namespace {

ModelFiles byte_files() {
  ModelFiles files;
  files.tokenizer = tokenizer::open_tokenizer("bytes").value();
  files.begin = files.text_begin = {tokenizer::kByteEndOfText};
  return files;
}

// -log of the probability of `token`, the naive way.
double surprise(std::span<const float> logits, int32_t token) {
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x));
  return std::log(sum) -
         static_cast<double>(logits[static_cast<size_t>(token)]);
}

// Of `text` after `before`, token by token.
double surprise(Generator& model, const std::string& before,
                const std::string& text) {
  model.truncate(0);
  int32_t last = tokenizer::kByteEndOfText;
  std::span<const float> logits = model.extend({&last, 1});
  const auto add = [&](char c) {
    last = static_cast<unsigned char>(c);
    logits = model.extend({&last, 1});
  };
  for (const char c : before) add(c);
  double sum = 0;
  for (const char c : text) {
    sum += surprise(logits, static_cast<unsigned char>(c));
    add(c);
  }
  return sum;
}

constexpr char kText[] = "It was a dark and stormy night; the rain fell.";

TEST(Evaluate, PredictsEachTokenOnceInWindows) {
  const SmallGenerator small;
  const ModelFiles files = byte_files();
  const std::string text = kText;
  // In one window.
  auto model = small.open(100, 100);
  int64_t ticks = 0;
  ASSERT_OK_AND(auto score,
                score_text(*model, files, text,
                           [&](int64_t done, int64_t) { ticks = done; }));
  EXPECT_EQ(score.tokens, static_cast<int64_t>(text.size()));
  EXPECT_EQ(ticks, score.tokens);
  const double want = surprise(*model, "", text);
  EXPECT_NEAR(score.nats, want, 1e-3);
  EXPECT_NEAR(score.perplexity(),
              std::exp(want / static_cast<double>(text.size())), 1e-3);
  EXPECT_NEAR(score.bits_per_byte(),
              want / static_cast<double>(text.size()) / std::log(2), 1e-4);
  // In windows of 10, each of which begins with the token before it. The last
  // one has six tokens of its own, and four of the window before.
  model = small.open(100, 10);
  ASSERT_OK_AND(score,
                score_text(*model, files, text, [](int64_t, int64_t) {}));
  double sum = 0;
  for (size_t at = 0; at < text.size(); at += 10) {
    model->truncate(0);
    const size_t from = std::min(at, text.size() - 10);
    int32_t last = from == 0 ? tokenizer::kByteEndOfText
                             : static_cast<unsigned char>(text[from - 1]);
    for (size_t i = from; i < from + 10; ++i) {
      const auto logits = model->extend({&last, 1});
      last = static_cast<unsigned char>(text[i]);
      if (i >= at) sum += surprise(logits, last);
    }
  }
  ASSERT_EQ(text.size() % 10, 6U);
  EXPECT_NEAR(score.nats, sum, 1e-3);
}

TEST(Evaluate, ChoosesTheLikeliestContinuation) {
  const SmallGenerator small;
  const ModelFiles files = byte_files();
  const auto model = small.open(60);
  const std::vector<std::string> choices = {" dark", " b", " stormy night"};
  std::vector<double> total, mean;
  for (const std::string& c : choices) {
    total.push_back(surprise(*model, "It was", c));
    mean.push_back(total.back() / static_cast<double>(c.size()));
  }
  const auto least = [](const std::vector<double>& v) {
    return std::min_element(v.begin(), v.end()) - v.begin();
  };
  for (int64_t answer = 0; answer < 3; ++answer) {
    // The space belongs to the continuation, wherever it is written.
    const std::vector<Question> questions = {
        {"It was", choices, answer},
        {"It was ", {"dark", "b", "stormy night"}, answer}};
    ASSERT_OK_AND(const auto score, score_choices(*model, files, questions,
                                                  [](int64_t, int64_t) {}));
    EXPECT_EQ(score.questions, 2);
    EXPECT_EQ(score.right, least(total) == answer ? 2 : 0);
    // The second question's choices are shorter by the space.
    EXPECT_GE(score.right_by_length, least(mean) == answer ? 1 : 0);
  }
}

TEST(Evaluate, AQuestionThatIsTooLongIsNamedBeforeTheFirstIsScored) {
  const SmallGenerator small;
  int ticks = 0;
  EXPECT_SAYS(
      score_choices(*small.open(8), byte_files(),
                    {{"a", {"b", "c"}, 0}, {"It was", {" dark", " b"}, 0}},
                    [&](int64_t, int64_t) { ++ticks; }),
      "question 2: has 12 tokens; at most 8 are allowed");
  EXPECT_EQ(ticks, 0);
}

// A token for each byte, but a single one for "New York".
class JoinsWords final : public tokenizer::Tokenizer {
 public:
  std::string id() const override { return "joins"; }
  int64_t vocab_size() const override { return 257; }
  int32_t end_of_text() const override { return 256; }
  Status encode(std::string_view text, const tokenizer::EncodeOptions&,
                std::vector<int32_t>& out) const override {
    if (text == "New York") text = "N";
    for (const char c : text) out.push_back(static_cast<unsigned char>(c));
    return ok_status();
  }
  Result<std::string_view> token_bytes(int32_t) const override {
    return std::string_view();
  }
};

// It would have the probability 1.
TEST(Evaluate, AChoiceWithoutATokenOfItsOwnIsNotScored) {
  const SmallGenerator small;
  ModelFiles files = byte_files();
  files.tokenizer = std::make_unique<JoinsWords>();
  const auto score =
      score_choices(*small.open(60), files, {{"New Yor", {"e", "k"}, 0}},
                    [](int64_t, int64_t) {});
  EXPECT_EQ(score.status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(score.status().message().starts_with(
      "question 1: the choice 'k' cannot be scored"))
      << score.status().message();
}

// No text has the token that the one weight is for.
TEST(Evaluate, AModelThatComputesNaNIsNotScored) {
  SmallGenerator small;
  const float nan = std::nanf("");
  for (size_t i = 0; i < small.files.shapes.size(); ++i)
    if (small.files.shapes[i].name == "lm_head.weight")
      std::memcpy(small.files.tensors[i].data(), &nan, sizeof nan);
  small.files.put_weights();
  const ModelFiles files = byte_files();
  const auto model = small.open(60);
  const int32_t token = 'a';
  EXPECT_EQ(check_finite(model->extend({&token, 1})).code(), Code::kCorrupt);
  const auto tick = [](int64_t, int64_t) {};
  EXPECT_EQ(score_text(*model, files, kText, tick).status().code(),
            Code::kCorrupt);
  EXPECT_EQ(score_choices(*model, files, {{"It", {"a", "b"}, 0}}, tick)
                .status()
                .code(),
            Code::kCorrupt);
}

TEST(Evaluate, QuestionsAreChecked) {
  const auto problem = [](const std::string& text) {
    return parse_questions(text, "q").status().message();
  };
  const std::string good =
      R"({"prompt": "a", "choices": ["b", "c"], "answer": 1, "id": 7})";
  ASSERT_OK_AND(const auto two, parse_questions(good + "\n\n" + good, "q"));
  EXPECT_EQ(two.size(), 2U);
  EXPECT_EQ(two[1].choices[1], "c");
  EXPECT_EQ(two[1].answer, 1);
  EXPECT_EQ(problem(""), "q: has no questions");
  EXPECT_EQ(problem(good + "\n[1]"), "q:2: is no JSON object");
  EXPECT_EQ(problem("{\"prompt\": "), "q:1: is no JSON object");
  EXPECT_EQ(problem(good + "\n" + std::string(300'000, '[')),
            "q:2: nested more than 256 deep");
  for (const auto& [text, want] :
       std::vector<std::pair<std::string, std::string>>{
           {R"({"choices": ["b", "c"], "answer": 1})", "q:1: prompt"},
           {R"({"prompt": "", "choices": ["b"], "answer": 0})", "q:1: choices"},
           {R"({"prompt": "", "choices": ["b", ""], "answer": 0})",
            "q:1: choices"},
           {R"({"prompt": "", "choices": ["b", "c"], "answer": 2})",
            "q:1: answer: must be from 0 to 1"},
           {R"({"prompt": "", "choices": ["b", "c"], "answer": "0"})",
            "q:1: answer"}})
    EXPECT_TRUE(problem(text).starts_with(want)) << problem(text);
}

}  // namespace
}  // namespace remesh::sample
