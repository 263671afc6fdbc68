// Models and tokens that the library made (data/sentencepiece/make.sh), and
// models that are refused.
#include "worker/tokenizer/sentencepiece.h"

#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/expect.h"
#include "tests/unit/tokenizer/encode.h"
#include "tests/unit/tokenizer/small_models.h"

namespace remesh::tokenizer {
namespace {

using Piece = pb::SentencePieceModel::Piece;

const std::string kFolder = "tests/unit/tokenizer/data/sentencepiece/";

std::vector<std::string> lines_of(const std::string& file) {
  std::vector<std::string> out;
  std::ifstream in(kFolder + file);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

std::unique_ptr<Tokenizer> open(const std::string& name) {
  auto made = open_tokenizer(kFolder + name + ".model");
  EXPECT_OK(made);
  return made.ok() ? std::move(*made) : nullptr;
}

TEST(SentencePiece, TokensAreThoseOfTheLibrary) {
  const auto texts = lines_of("lines.txt");
  ASSERT_EQ(texts.size(), 110u);
  for (const std::string name : {"as_llama", "as_gemma", "removes_spaces"}) {
    const auto t = open(name);
    ASSERT_NE(t, nullptr);
    EXPECT_EQ(t->vocab_size(), 480);
    EXPECT_EQ(t->end_of_text(), 2);
    const auto want = lines_of(name + ".ids");
    ASSERT_EQ(want.size(), texts.size());
    for (size_t i = 0; i < texts.size(); ++i) {
      std::istringstream numbers(want[i]);
      EXPECT_EQ(encode(*t, texts[i]),
                Tokens(std::istream_iterator<int32_t>(numbers), {}))
          << name << ": " << texts[i];
    }
  }
}

// But that a mark in the text cannot be told from a space.
TEST(SentencePiece, AnyBytesComeBack) {
  for (const std::string name : {"as_llama", "as_gemma"}) {
    const auto t = open(name);
    ASSERT_NE(t, nullptr);
    std::string all;
    for (int b = 0; b < 256; ++b) all.push_back(static_cast<char>(b));
    auto texts = lines_of("lines.txt");
    texts.push_back(all);
    for (const std::string& text : texts) {
      if (text.find(kSpaceMark) != std::string::npos) continue;
      EXPECT_EQ(t->decode(encode(*t, text)).value(), text) << name;
    }
  }
}

// As of a chat: what is between special tokens is like a text of its own.
TEST(SentencePiece, SpecialTokensDivideAText) {
  for (const std::string name : {"as_llama", "as_gemma", "removes_spaces"}) {
    const auto t = open(name);
    ASSERT_NE(t, nullptr);
    const auto with = [&](const std::string& text) {
      return encode(*t, text, {.special = true});
    };
    Tokens want{1};
    for (const int32_t token : encode(*t, "a b")) want.push_back(token);
    want.push_back(2);
    for (const int32_t token : encode(*t, " c")) want.push_back(token);
    EXPECT_EQ(with("<s>a b</s> c"), want) << name;
    EXPECT_EQ(with("a b"), encode(*t, "a b")) << name;
    EXPECT_EQ(with(""), Tokens{}) << name;
    const Tokens answer = encode(*t, "a b");
    EXPECT_EQ(encode(*t, "a b",
                     {.special = true, .continues = true, .after_added = true}),
              answer)
        << name;
    EXPECT_TRUE(t->is_added(2)) << name;
    EXPECT_TRUE(t->restarts_after(2)) << name;
    EXPECT_FALSE(t->is_added(answer[0])) << name;
  }
}

TEST(SentencePiece, ADocumentComesInParts) {
  for (const std::string name : {"as_llama", "as_gemma", "removes_spaces"}) {
    const auto t = open(name);
    ASSERT_NE(t, nullptr);
    Tokens parts = encode(*t, " The first  part\n");
    for (const int32_t token :
         encode(*t, " and the  second ", {.continues = true}))
      parts.push_back(token);
    EXPECT_EQ(parts, encode(*t, " The first  part\n and the  second ")) << name;
  }
}

TEST(SentencePiece, ControlTokensAreFoundWhereTheyAreAskedFor) {
  const auto t = open("removes_spaces");
  ASSERT_NE(t, nullptr);
  const std::string text = "<|user|>a</s>";
  const Tokens found = encode(*t, text, {.special = true, .continues = true});
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(t->token_bytes(found[0]).value(), "<|user|>");
  EXPECT_EQ(found[2], t->end_of_text());
  EXPECT_GT(encode(*t, text).size(), 8u) << "it is text";
}

TEST(SentencePiece, OtherModelsAreRefusedByName) {
  using Change = std::function<void(pb::SentencePieceModel*)>;
  const auto trainer = [](const auto& change) -> Change {
    return [change](auto* m) { change(m->mutable_trainer_spec()); };
  };
  const auto normalizer = [](const auto& change) -> Change {
    return [change](auto* m) { change(m->mutable_normalizer_spec()); };
  };
  const auto piece = [](const std::string& text, Piece::Type type) -> Change {
    return [text, type](auto* m) {
      Piece* p = m->add_pieces();
      p->set_piece(text);
      p->set_type(type);
    };
  };
  const std::vector<std::pair<Change, std::string>> cases = {
      {[](auto*) {}, ""},
      {trainer([](auto* t) { t->clear_model_type(); }), "UNIGRAM"},
      {trainer([](auto* t) { t->set_byte_fallback(false); }), "byte_fallback"},
      {trainer([](auto* t) { t->set_treat_whitespace_as_suffix(true); }),
       "treat_whitespace_as_suffix"},
      {trainer([](auto* t) { t->set_eos_piece("<end>"); }), "eos_piece"},
      {normalizer([](auto* n) { n->set_precompiled_charsmap("x"); }),
       "precompiled_charsmap"},
      {normalizer([](auto* n) { n->set_escape_whitespaces(false); }),
       "escape_whitespaces"},
      {piece("hello", Piece::NORMAL), " occurs twice"},
      {piece("", Piece::NORMAL), "1 to 1024 bytes"},
      {piece("\xFF", Piece::NORMAL), "UTF-8"},
      {piece("hx", Piece::NORMAL), "a character that is no piece"},
      {[](auto* m) {
         for (const auto& [text, type] :
              {std::pair{"x", Piece::CONTROL}, {"hx", Piece::NORMAL}}) {
           m->add_pieces()->set_piece(text);
           m->mutable_pieces(m->pieces_size() - 1)->set_type(type);
         }
       },
       "a character that is no piece"},
      {piece("<0x41>", Piece::NORMAL), "named like a byte"},
      {piece("byte", Piece::BYTE), "not named like a byte"},
      {piece("<0x41>", Piece::BYTE), "257 pieces for bytes"},
      {piece("eh", Piece::UNUSED), "unused although text becomes it"},
      {piece("w", Piece::UNUSED), "unused although text becomes it"},
      {[](auto* m) {
         m->mutable_pieces(m->pieces_size() - 1)
             ->set_score(std::numeric_limits<float>::infinity());
       },
       "a finite score"}};
  for (const auto& [change, what] : cases) {
    pb::SentencePieceModel model = small_sentencepiece();
    change(&model);
    const auto t = parse_sentencepiece(model.SerializeAsString(), "t.model");
    EXPECT_EQ(t.ok(), what.empty()) << what;
    if (t.ok()) continue;
    EXPECT_SAYS(t, what);
    EXPECT_TRUE(t.status().message().starts_with("t.model: "));
  }
  std::string many;
  for (int i = 0; i <= 1 << 20; ++i) many += std::string("\n\0", 2);
  EXPECT_SAYS(parse_sentencepiece(many, "t"), "1048576 pieces");
  EXPECT_FALSE(parse_sentencepiece("\nx", "t").ok());
}

}  // namespace
}  // namespace remesh::tokenizer
