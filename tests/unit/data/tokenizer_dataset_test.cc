// Data sets whose tokenizer is a file.
#include <mutex>
#include <set>
#include <thread>

#include "tests/testing/expect.h"
#include "tests/unit/data/data_test_util.h"
#include "worker/data/dataset.h"
#include "worker/data/prepare.h"
#include "worker/data/split_writer.h"
#include "worker/data/text_encoder.h"
#include "worker/data/token_shard.h"
#include "worker/tokenizer/bpe_trainer.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::data {
namespace {

PrepareOptions options(const TempDir& dir, const std::string& text) {
  PrepareOptions o;
  o.inputs = {dir.write("in.txt", text)};
  o.out_dir = dir / "out";
  o.val_fraction = 0;
  return o;
}

// A data set of byte-level BPE: its documents are encoded as a whole, whatever
// the blocks and parts are, and decoding gives the text back.
TEST(TokenizerDataset, WithATokenizerFileDocumentsAreEncodedAsAWhole) {
  const TempDir dir;
  const std::string text = words(5'000'000);
  ASSERT_OK_AND(auto trainer, tokenizer::BpeTrainer::make(600));
  ASSERT_OK(trainer.add(text.substr(0, 100'000)));
  const std::string file =
      dir.write("tokenizer.json", trainer.finish().value());
  PrepareOptions o = options(dir, text);
  o.tokenizer = file;
  make(o);
  ASSERT_OK_AND(const auto t, tokenizer::open_tokenizer(file));
  ASSERT_OK_AND(const auto set, Dataset::open(dir / "out"));
  EXPECT_EQ(set.tokenizer(), t->id());
  EXPECT_EQ(set.vocab_size(), 600);
  EXPECT_EQ(set.end_of_text(), 599);
  const std::vector<int32_t> tokens = tokens_of(set.train());
  const std::string mark = "<|endoftext|>\n";
  EXPECT_EQ(t->decode(tokens).value(), text + mark);
  std::vector<int32_t> expected;
  std::string rest = text + mark;
  for (size_t at = rest.find(mark); at != std::string::npos;
       at = rest.find(mark)) {
    ASSERT_OK(t->encode(rest.substr(0, at), {}, expected));
    expected.push_back(599);
    rest.erase(0, at + mark.size());
  }
  EXPECT_EQ(tokens, expected);
}

// A document that is longer than a part is encoded in parts, which end where
// tokens do.
TEST(TokenizerDataset, ALongDocumentIsEncodedInParts) {
  const TempDir dir;
  std::string text;
  for (int i = 0; i < 600'000; ++i)
    text += "line " + std::to_string(i % 1000 * 919 % 1000) +
            (i % 3 == 0   ? ".\n"
             : i % 5 == 0 ? " \n\n"
                          : " ");
  ASSERT_GT(text.size(), size_t{4} << 20);
  auto trainer = tokenizer::BpeTrainer::make(500);
  ASSERT_OK(trainer->add(text.substr(0, 100'000)));
  PrepareOptions o = options(dir, text);
  o.tokenizer = dir.write("tokenizer.json", trainer->finish().value());
  make(o);
  const auto t = tokenizer::open_tokenizer(o.tokenizer);
  std::vector<int32_t> expected;
  ASSERT_OK((*t)->encode(text, {}, expected));
  expected.push_back(499);
  const auto set = Dataset::open(dir / "out");
  EXPECT_EQ(tokens_of(set->train()), expected);
}

// Without a line end it is divided before a word.
TEST(TextEncoder, ATextThatComesInPortionsHasTheTokensOfTheWhole) {
  std::string text;
  while (text.size() < size_t{9} << 20)
    text += " na\u00EFve " + std::to_string(text.size() % 919);
  auto trainer = tokenizer::BpeTrainer::make(400);
  ASSERT_OK(trainer->add(text.substr(0, 100'000)));
  const TempDir dir;
  ASSERT_OK_AND(const auto tokenizer,
                tokenizer::open_tokenizer(
                    dir.write("t.json", trainer->finish().value())));
  for (const bool ends : {false, true}) {
    std::vector<int32_t> got, expected;
    TextEncoder encoder(*tokenizer, {.ends = ends},
                        [&](int to, std::span<const int32_t> tokens) {
                          EXPECT_EQ(to, 7);
                          got.insert(got.end(), tokens.begin(), tokens.end());
                          return ok_status();
                        });
    for (size_t at = 0; at < text.size(); at += 1'000'003)
      ASSERT_OK(
          encoder.add(std::string_view(text).substr(at, size_t{1'000'003}), 7));
    ASSERT_OK(encoder.finish());
    ASSERT_OK(tokenizer->encode(text, {}, expected));
    if (ends) expected.push_back(tokenizer->end_of_text());
    EXPECT_TRUE(got == expected) << got.size() << " and " << expected.size();
  }
}

// Bytes, which remembers what threads have encoded.
class Remembers final : public tokenizer::Tokenizer {
 public:
  std::string id() const override { return "remembers"; }
  int64_t vocab_size() const override { return 257; }
  int32_t end_of_text() const override { return 256; }
  Status encode(std::string_view text, const tokenizer::EncodeOptions&,
                std::vector<int32_t>& out) const override {
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
    for (const char c : text) out.push_back(static_cast<unsigned char>(c));
    return ok_status();
  }
  Result<std::string_view> token_bytes(int32_t) const override {
    return std::string_view();
  }
  mutable std::mutex mutex;
  mutable std::set<std::thread::id> threads;
};

TEST(BlockRouter, HasTextEncodedByOtherThreadsAndKeepsItsOrder) {
  const TempDir dir;
  const auto fs = posix_file_system();
  const Remembers tokenizer;
  SplitWriter train(*fs, dir.path(), "train", tokenizer, 1 << 30, false);
  SplitWriter val(*fs, dir.path(), "val", tokenizer, 1 << 30, false);
  BlockRouter router(/*fraction=*/0, /*seed=*/1, /*block_bytes=*/1 << 20,
                     tokenizer, train, val);
  std::vector<int32_t> expected;
  for (const char c : std::string("abcdefghij")) {
    const std::string text(700'000, c);
    ASSERT_TRUE(
        router.add(TextBlock{.text = text, .ends = {1, text.size()}}).ok());
    expected.push_back(c);
    expected.push_back(256);
    expected.insert(expected.end(), text.size() - 1, c);
    expected.push_back(256);
  }
  ASSERT_TRUE(router.finish().ok());
  ASSERT_TRUE(train.finish().ok());
  ASSERT_TRUE(train.rename().ok());
  const auto shard = MappedShard::open(dir / "train-00000.tok");
  ASSERT_TRUE(shard.ok()) << shard.status().to_string();
  std::vector<int32_t> tokens(static_cast<size_t>(shard->info().num_tokens));
  ASSERT_TRUE(shard->read(0, tokens).ok());
  EXPECT_EQ(tokens, expected);
  EXPECT_FALSE(tokenizer.threads.contains(std::this_thread::get_id()));
}

// A tokenizer of bytes, with a normalizer.
std::string normalizing(const std::string& normalizer) {
  std::string json = tokenizer::BpeTrainer::make(257)->finish().value();
  const std::string none = "\"normalizer\": null";
  EXPECT_NE(json.find(none), std::string::npos);
  return json.replace(json.find(none), none.size(),
                      "\"normalizer\": " + normalizer);
}

TEST(TokenizerDataset, WhatTheTokenizerChangesIsSaid) {
  const TempDir dir;
  PrepareOptions o = options(dir, "Some Text\n");
  o.tokenizer =
      dir.write("tokenizer.json", normalizing(R"({"type": "Lowercase"})"));
  for (const bool again : {false, true}) {
    ASSERT_OK_AND(const auto summary, prepare(o, *posix_file_system()));
    EXPECT_EQ(summary.up_to_date, again);
    EXPECT_EQ(summary.changes, "Lowercase");
  }
}

// The pieces of a conversation are one text, from which a tokenizer strips
// nothing in the middle.
TEST(BlockRouter, PiecesOfAConversationContinueEachOther) {
  const TempDir dir;
  const auto fs = posix_file_system();
  ASSERT_OK_AND(const auto tokenizer,
                tokenizer::open_tokenizer(dir.write(
                    "t.json", normalizing(R"({"type": "Strip", )"
                                          R"("strip_left": true, )"
                                          R"("strip_right": true})"))));
  SplitWriter train(*fs, dir.path(), "train", *tokenizer, 1 << 20, true);
  SplitWriter val(*fs, dir.path(), "val", *tokenizer, 1 << 20, true);
  BlockRouter router(/*fraction=*/0, /*seed=*/1, /*block_bytes=*/1 << 20,
                     *tokenizer, train, val);
  ASSERT_OK(router.add(Conversation{{" a ", false}, {" b ", true}}));
  ASSERT_OK(router.finish());
  ASSERT_OK(train.finish());
  ASSERT_OK(train.rename());
  ASSERT_OK_AND(const auto shard, MappedShard::open(dir / "train-00000.tok"));
  std::vector<int32_t> tokens(static_cast<size_t>(shard.info().num_tokens));
  ASSERT_OK(shard.read(0, tokens));
  EXPECT_EQ(tokens, (std::vector<int32_t>{'a', ' ', ' ', 'b'}));
}

TEST(TokenizerDataset, AnotherTokenizerMakesAnotherDataSet) {
  const TempDir dir;
  PrepareOptions o = options(dir, words(50'000));
  o.tokenizer = "bytes";
  make(o);
  auto trainer = tokenizer::BpeTrainer::make(300);
  ASSERT_OK(trainer->add(words(50'000)));
  o.tokenizer = dir.write("tokenizer.json", trainer->finish().value());
  const Status status = prepare(o, *posix_file_system()).status();
  EXPECT_EQ(status.code(), Code::kAlreadyExists) << status.to_string();
  o.overwrite = true;
  make(o);
  o.tokenizer = dir / "missing.json";
  EXPECT_EQ(prepare(o, *posix_file_system()).status().code(), Code::kNotFound);
}

}  // namespace
}  // namespace remesh::data
