// Fuzzes (tests/testing/fuzz.h) the files of tokenizers, and encodes text with
// those that are accepted.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/testing/fuzz.h"
#include "tests/unit/tokenizer/small_models.h"
#include "worker/tokenizer/sentencepiece.h"
#include "worker/tokenizer/tiktoken.h"
#include "worker/tokenizer/tokenizer_json.h"

namespace remesh::tokenizer {
namespace {

const std::string kText =
    "hello  hello, 123 \u00E9\u2581 \xFF\n</s><tool>'ll AB\t";

// Encodes and decodes, and checks that every token is in the vocabulary.
Status use(const Tokenizer& t) {
  EXPECT_GE(t.end_of_text(), 0);
  EXPECT_LT(t.end_of_text(), t.vocab_size());
  EXPECT_LE(t.vocab_size(), int64_t{1} << 23);
  std::vector<int32_t> tokens;
  RETURN_IF_ERROR(t.encode(kText, {.special = true}, tokens));
  for (const int32_t token : tokens) EXPECT_LT(token, t.vocab_size());
  return t.decode(tokens).status();
}

std::vector<std::string> files() {
  Json split = byte_level();
  split["normalizer"] = {{"type", "Sequence"},
                         {"normalizers", {{{"type", "NFC"}}}}};
  split["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"},
         {"pattern", {{"Regex", "[a-z]+| ?\\d"}}},
         {"behavior", "Isolated"},
         {"invert", false}},
        {{"type", "Punctuation"}, {"behavior", "Removed"}},
        {{"type", "ByteLevel"}, {"add_prefix_space", false}},
        {{"type", "Digits"}, {"individual_digits", true}}}}};
  Json unknown = sentencepiece_like();
  unknown["model"]["byte_fallback"] = false;
  unknown["added_tokens"][1] = {{"id", 270},
                                {"content", "<tool>"},
                                {"single_word", true},
                                {"normalized", true}};
  unknown["normalizer"]["normalizers"].insert(
      unknown["normalizer"]["normalizers"].begin(),
      {{{"type", "NFKC"}},
       {{"type", "Lowercase"}},
       {{"type", "Strip"}, {"strip_left", true}, {"strip_right", true}},
       {{"type", "Replace"},
        {"pattern", {{"Regex", "[0-9]+"}}},
        {"content", "0"}}});
  return {sentencepiece_like().dump(), byte_level().dump(), split.dump(),
          unknown.dump()};
}

TEST(TokenizerFuzz, TokenizerJson) {
  fuzz(files(), 10000, [](const std::string& text) -> Status {
    ASSIGN_OR_RETURN(const auto t, parse_tokenizer_json(text, "t.json"));
    return use(*t);
  });
}

// Changes of the parts before the vocabulary, which is most of the text.
TEST(TokenizerFuzz, Components) {
  for (const std::string& file : files()) {
    Json json = Json::parse(file);
    const std::string model = json["model"].dump();
    json.erase("model");
    fuzz({json.dump()}, 4000, [&](const std::string& text) -> Status {
      const size_t end = text.rfind('}');
      if (end == std::string::npos) return invalid_argument("no object");
      ASSIGN_OR_RETURN(
          const auto t,
          parse_tokenizer_json(
              text.substr(0, end) + ",\"model\":" + model + "}", "t.json"));
      return use(*t);
    });
  }
}

TEST(TokenizerFuzz, SentencePiece) {
  fuzz({small_sentencepiece().SerializeAsString()}, 10000,
       [](const std::string& file) -> Status {
         ASSIGN_OR_RETURN(const auto t, parse_sentencepiece(file, "t.model"));
         return use(*t);
       });
}

// Mutants of the first lines, so that they are often changed.
TEST(TokenizerFuzz, Tiktoken) {
  std::string rest;
  for (int i = 64; i < 50256; ++i) {
    const auto digit = [&](int shift) {
      return "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef"[i >> shift & 31];
    };
    rest += fmt::format("{}{}{}{} {}\n", digit(15), digit(10), digit(5),
                        digit(0), i);
  }
  std::string text;
  for (int i = 0; i < 64; ++i)
    text += fmt::format("{}{} {}\n", static_cast<char>('A' + i % 26),
                        i < 26   ? "Q=="
                        : i < 52 ? "WFh"
                                 : "nhI",
                        i);
  fuzz({text}, 1000, [&](const std::string& begin) -> Status {
    ASSIGN_OR_RETURN(const auto t, parse_tiktoken(begin + rest, "t"));
    std::vector<int32_t> tokens;
    (void)t->encode(kText, {}, tokens).ok();  // most bytes have no token
    return ok_status();
  });
}

}  // namespace
}  // namespace remesh::tokenizer
