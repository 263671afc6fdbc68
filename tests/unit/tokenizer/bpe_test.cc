#include "worker/tokenizer/bpe.h"

#include <fmt/format.h>

#include <random>
#include <string>
#include <vector>

#include "tests/testing/expect.h"
#include "tests/testing/seed.h"

namespace remesh::tokenizer {
namespace {

// A model over `alphabet` letters with `count` random merges. With
// `equal_ranks`, merges of the same result have the same rank, as in tiktoken.
BpeModel random_model(std::mt19937& rng, int alphabet, int count) {
  BpeModel m;
  m.byte_level = true;
  for (int i = 0; i < alphabet; ++i)
    m.tokens.emplace_back(1, static_cast<char>('a' + i));
  for (int i = 0; i < count; ++i) {
    const auto pick = [&] {
      return static_cast<int32_t>(rng() % m.tokens.size());
    };
    const int32_t left = pick();
    const int32_t right = pick();
    const std::string text = m.tokens[static_cast<size_t>(left)] +
                             m.tokens[static_cast<size_t>(right)];
    if (text.size() > 24 ||
        std::find(m.tokens.begin(), m.tokens.end(), text) != m.tokens.end())
      continue;
    m.merges.push_back({left, right, static_cast<int32_t>(m.tokens.size()),
                        static_cast<uint32_t>(m.merges.size())});
    m.tokens.push_back(text);
  }
  return m;
}

// The definition: merges the leftmost pair of lowest rank until there is none.
std::vector<int32_t> naive(const BpeModel& model, const std::string& piece) {
  std::vector<int32_t> ids;
  for (const char c : piece)
    for (size_t i = 0; i < model.tokens.size(); ++i)
      if (model.tokens[i] == std::string(1, c))
        ids.push_back(static_cast<int32_t>(i));
  for (;;) {
    const BpeModel::Merge* best = nullptr;
    size_t where = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i)
      for (const BpeModel::Merge& m : model.merges)
        if (m.left == ids[i] && m.right == ids[i + 1] &&
            (best == nullptr || m.rank < best->rank)) {
          best = &m;
          where = i;
        }
    if (best == nullptr) return ids;
    ids[where] = best->result;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(where) + 1);
  }
}

TEST(Bpe, MergesAsTheNaiveTwinDoes) {
  for (const uint32_t seed : test_seeds(60)) {
    std::mt19937 rng(seed);
    const int alphabet = 1 + static_cast<int>(rng() % 4);
    const BpeModel model = random_model(rng, alphabet, 40);
    ASSERT_OK_AND(const auto bpe, Bpe::make(model));
    Bpe::Scratch scratch(200);
    for (const size_t length : {0U, 1U, 2U, 7U, 39U, 40U, 41U, 42U, 150U}) {
      std::string piece;
      for (size_t i = 0; i < length; ++i)
        piece.push_back(
            static_cast<char>('a' + rng() % static_cast<unsigned>(alphabet)));
      std::vector<int32_t> tokens;
      ASSERT_OK(bpe.encode(piece, scratch, tokens));
      EXPECT_EQ(tokens, naive(model, piece)) << seed << ": " << piece;
    }
  }
}

// Two merges of one rank, which tiktoken files have.
TEST(Bpe, OfEqualRanksTheLeftmostMergesFirst) {
  BpeModel m;
  m.byte_level = true;
  m.tokens = {"a", "aa", "aaa"};
  m.merges = {{0, 0, 1, 1}, {0, 1, 2, 2}, {1, 0, 2, 2}};
  ASSERT_OK_AND(const auto bpe, Bpe::make(m));
  Bpe::Scratch scratch(200);
  for (size_t n = 1; n < 100; ++n) {
    std::vector<int32_t> tokens;
    ASSERT_OK(bpe.encode(std::string(n, 'a'), scratch, tokens));
    EXPECT_EQ(tokens, naive(m, std::string(n, 'a'))) << n;
  }
}

TEST(Bpe, AMegabyteOfOneCharacterIsNotQuadratic) {
  BpeModel m;
  m.byte_level = true;
  std::string token = "a";
  m.tokens = {token};
  for (int32_t i = 0; i < 6; ++i) {
    token += token;
    m.merges.push_back({i, i, i + 1, static_cast<uint32_t>(i)});
    m.tokens.push_back(token);
  }
  ASSERT_OK_AND(const auto bpe, Bpe::make(m));
  Bpe::Scratch scratch(200);
  std::vector<int32_t> tokens;
  // Quadratic, this would take hours.
  ASSERT_OK(bpe.encode(std::string(size_t{1} << 20, 'a'), scratch, tokens));
  EXPECT_EQ(tokens, std::vector<int32_t>((1 << 20) / 64, 6));
}

TEST(Bpe, CharactersWithoutATokenBecomeBytes) {
  BpeModel m;
  m.tokens = {"é", "a"};
  const auto encode = [&](const std::string& text) {
    const auto bpe = Bpe::make(m);
    EXPECT_OK(bpe);
    Bpe::Scratch scratch(200);
    std::vector<int32_t> tokens;
    const Status status = bpe->encode(text, scratch, tokens);
    if (!status.ok()) tokens = {-1};
    return tokens;
  };
  using Tokens = std::vector<int32_t>;
  EXPECT_EQ(encode("aéa"), (Tokens{1, 0, 1}));
  EXPECT_EQ(encode("aê"), (Tokens{-1}));
  for (int b = 0; b < 256; ++b)
    m.tokens.push_back(fmt::format("<0x{:02X}>", b));
  EXPECT_EQ(encode("aê\xFF"), (Tokens{1, 2 + 0xC3, 2 + 0xAA, 2 + 0xFF}));
}

// What has a token for each of its bytes is known.
TEST(Bpe, OneTokenMayStandForWhatIsUnknown) {
  using Tokens = std::vector<int32_t>;
  const auto encode = [](const BpeModel& m, const std::string& text) {
    const auto bpe = Bpe::make(m);
    EXPECT_OK(bpe);
    Bpe::Scratch scratch(200);
    Tokens tokens;
    EXPECT_OK(bpe->encode(text, scratch, tokens));
    return tokens;
  };
  BpeModel m;
  m.tokens = {"<unk>", "a", "<0x78>", "<0xC3>"};
  m.unknown = 0;
  EXPECT_EQ(encode(m, "éêaxé\xFF"), (Tokens{0, 0, 1, 2, 0, 0}));
  m.fuse_unknown = true;
  EXPECT_EQ(encode(m, "éêaxé\xFF"), (Tokens{0, 1, 2, 0}));
  m.byte_fallback = false;
  EXPECT_EQ(encode(m, "éêaxé\xFF"), (Tokens{0, 1, 0}));
  m.byte_level = true;
  EXPECT_EQ(encode(m, "éaxa"), (Tokens{0, 1, 0, 1}));
  m.fuse_unknown = false;
  EXPECT_EQ(encode(m, "éaxa"), (Tokens{0, 0, 1, 0, 1}));
}

// The cache of a short text has few places, which many pieces share.
TEST(Bpe, TheCacheChangesNothing) {
  std::mt19937 rng(test_seed());
  const BpeModel model = random_model(rng, 3, 40);
  ASSERT_OK_AND(const auto bpe, Bpe::make(model));
  Bpe::Scratch scratch(30);
  for (int i = 0; i < 2000; ++i) {
    std::string piece;
    for (size_t n = 1 + rng() % 4; n > 0; --n)
      piece.push_back(static_cast<char>('a' + rng() % 3));
    std::vector<int32_t> tokens;
    ASSERT_OK(bpe.encode(piece, scratch, tokens));
    EXPECT_EQ(tokens, naive(model, piece)) << piece;
  }
}

TEST(Bpe, InvalidModelsAreRefused) {
  EXPECT_FALSE(Bpe::make({}).ok());
  EXPECT_FALSE(Bpe::make({.tokens = {"a", "a"}}).ok());
  EXPECT_FALSE(
      Bpe::make({.tokens = {"a", "b"}, .merges = {{0, 1, 2, 0}}}).ok());
  EXPECT_FALSE(
      Bpe::make({.tokens = {"a", "b"}, .merges = {{-1, 1, 0, 0}}}).ok());
}

}  // namespace
}  // namespace remesh::tokenizer
