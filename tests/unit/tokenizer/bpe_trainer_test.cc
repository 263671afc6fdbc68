#include "worker/tokenizer/bpe_trainer.h"

#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "tests/testing/expect.h"
#include "tests/testing/seed.h"
#include "worker/tokenizer/pipeline.h"
#include "worker/tokenizer/tokenizer_json.h"
#include "worker/tokenizer/unicode.h"

namespace remesh::tokenizer {
namespace {

std::string random_text(uint32_t seed, size_t words) {
  std::mt19937 rng(seed);
  std::string text;
  for (size_t i = 0; i < words; ++i) {
    for (size_t n = 1 + rng() % 6; n > 0; --n)
      text.push_back(static_cast<char>('a' + rng() % 5));
    text += rng() % 9 == 0 ? "\n" : rng() % 7 == 0 ? " é" : " ";
  }
  return text;
}

std::string train(const std::string& text, int64_t vocab_size) {
  auto trainer = BpeTrainer::make(vocab_size);
  EXPECT_OK(trainer);
  EXPECT_OK(trainer->add(text));
  uint64_t last = 257;
  auto json = trainer->finish([&](uint64_t done, uint64_t total) {
    EXPECT_GE(done, last);
    EXPECT_EQ(total, static_cast<uint64_t>(vocab_size));
    last = done;
  });
  EXPECT_OK(json);
  EXPECT_EQ(last, static_cast<uint64_t>(vocab_size));
  return *json;
}

// Counts all pairs again before every merge.
std::vector<std::string> naive_merges(const std::string& text, size_t count) {
  using Word = std::vector<int>;
  std::map<Word, int64_t> words;
  Matcher matcher;
  const Regex pattern = Regex::compile(kLlama3Pattern).value();
  EXPECT_OK(
      pattern.for_each_match(text, matcher, [&](size_t begin, size_t end) {
        Word word;
        for (size_t i = begin; i < end; ++i)
          word.push_back(static_cast<unsigned char>(text[i]));
        ++words[word];
        return ok_status();
      }));
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, static_cast<char>(b));
  std::vector<std::string> merges;
  while (tokens.size() < 256 + count) {
    std::map<std::pair<int, int>, int64_t> pairs;
    for (const auto& [word, n] : words)
      for (size_t i = 0; i + 1 < word.size(); ++i)
        pairs[{word[i], word[i + 1]}] += n;
    auto best = pairs.begin();
    for (auto it = pairs.begin(); it != pairs.end(); ++it)
      if (it->second > best->second) best = it;
    const auto [left, right] = best->first;
    const std::string joined =
        tokens[static_cast<size_t>(left)] + tokens[static_cast<size_t>(right)];
    merges.push_back(to_alphabet(tokens[static_cast<size_t>(left)]) + " " +
                     to_alphabet(tokens[static_cast<size_t>(right)]));
    const auto at = std::find(tokens.begin(), tokens.end(), joined);
    const int token = static_cast<int>(at - tokens.begin());
    if (at == tokens.end()) tokens.push_back(joined);
    std::map<Word, int64_t> next;
    for (const auto& [word, n] : words) {
      Word merged;
      for (size_t i = 0; i < word.size(); ++i) {
        const bool here =
            i + 1 < word.size() && word[i] == left && word[i + 1] == right;
        merged.push_back(here ? token : word[i]);
        if (here) ++i;
      }
      next[merged] += n;
    }
    words = next;
  }
  return merges;
}

TEST(BpeTrainer, MergesAsTheNaiveTwinDoes) {
  for (const uint32_t seed : test_seeds(4)) {
    const std::string text = random_text(seed, 3000);
    const auto json = nlohmann::json::parse(train(text, 256 + 150 + 1));
    std::vector<std::string> merges;
    for (const auto& m : json["model"]["merges"])
      merges.push_back(m.get<std::string>());
    EXPECT_EQ(merges, naive_merges(text, 150)) << seed;
  }
}

TEST(BpeTrainer, ItsTokenizerRepresentsAnyBytes) {
  std::mt19937 rng(test_seed());
  const std::string text = random_text(1, 3000);
  ASSERT_OK_AND(const auto t,
                parse_tokenizer_json(train(text, 400), "trained"));
  EXPECT_EQ(t->vocab_size(), 400);
  EXPECT_EQ(t->end_of_text(), 399);
  for (int i = 0; i < 300; ++i) {
    std::string bytes;
    for (size_t n = rng() % 300; n > 0; --n)
      bytes.push_back(static_cast<char>(rng() % 2 == 0 ? rng() : 'a'));
    std::vector<int32_t> tokens;
    ASSERT_OK(t->encode(bytes, {}, tokens));
    EXPECT_EQ(t->decode(tokens).value(), bytes);
  }
  std::vector<int32_t> tokens;
  ASSERT_OK(t->encode(text, {}, tokens));
  EXPECT_LT(tokens.size() * 2, text.size());
}

TEST(BpeTrainer, TheOrderOfTextsDoesNotMatter) {
  auto forward = BpeTrainer::make(300);
  auto backward = BpeTrainer::make(300);
  std::vector<std::string> texts;
  for (uint32_t i = 0; i < 5; ++i) texts.push_back(random_text(i, 500) + "\n");
  for (size_t i = 0; i < 5; ++i) {
    ASSERT_OK(forward->add(texts[i]));
    ASSERT_OK(backward->add(texts[4 - i]));
  }
  EXPECT_EQ(forward->finish().value(), backward->finish().value());
}

TEST(BpeTrainer, TooLittleTextAndWrongSizesAreRefused) {
  auto trainer = BpeTrainer::make(400);
  ASSERT_OK(trainer->add("abab abab"));
  EXPECT_SAYS(trainer->finish(), "enough for 25");
  EXPECT_FALSE(BpeTrainer::make(256).ok());
  EXPECT_FALSE(BpeTrainer::make(int64_t{1} << 40).ok());
}

}  // namespace
}  // namespace remesh::tokenizer
