#include "worker/tokenizer/tokenizer.h"

#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/testing/expect.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/tokenizer/encode.h"
#include "tests/unit/tokenizer/small_models.h"
#include "worker/tokenizer/tiktoken.h"

namespace remesh::tokenizer {
namespace {

TEST(Tokenizer, BytesRoundTrip) {
  ASSERT_OK_AND(const auto t, open_tokenizer("bytes"));
  std::string all;
  for (int b = 0; b < 256; ++b) all.push_back(static_cast<char>(b));
  const Tokens tokens = encode(*t, all);
  ASSERT_EQ(tokens.size(), 256U);
  EXPECT_EQ(tokens[255], 255);
  EXPECT_EQ(t->decode(tokens).value(), all);
  EXPECT_EQ(t->decode(Tokens{'a', 256, 'b'}).value(), "a\n<|endoftext|>\nb");
  EXPECT_EQ(t->decode(Tokens{'a', '\n', 256, 256}).value(),
            "a\n<|endoftext|>\n<|endoftext|>\n");
  EXPECT_FALSE(t->decode(Tokens{257}).ok());
  EXPECT_FALSE(t->decode(Tokens{-1}).ok());
}

TEST(TextStream, WithholdsIncompleteCharacters) {
  const auto t = open_tokenizer("bytes");
  TextStream stream(**t);
  std::string out;
  std::vector<std::string> seen;
  for (const char c : std::string("a\xE2\x96\x81\xFF\xF0\x9F")) {
    ASSERT_OK(stream.add(static_cast<unsigned char>(c), out));
    seen.push_back(out);
  }
  EXPECT_EQ(seen,
            (std::vector<std::string>{"a", "a", "a", "a\u2581", "a\u2581\xFF",
                                      "a\u2581\xFF", "a\u2581\xFF"}));
  stream.finish(out);
  EXPECT_EQ(out, "a\u2581\xFF\xF0\x9F");
}

// A tiktoken file of the bytes, three tokens, and others that never occur.
std::string tiktoken(int ranks) {
  const auto base64 = [](const std::string& bytes) {
    constexpr char kDigits[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    for (size_t i = 0; i < bytes.size(); i += 3) {
      uint32_t bits = 0;
      for (size_t k = 0; k < 3; ++k)
        bits = bits << 8 |
               (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k])
                                     : 0U);
      for (size_t k = 0; k < 4; ++k)
        out += i + k > bytes.size() ? '=' : kDigits[bits >> (18 - 6 * k) & 63];
    }
    return out;
  };
  std::string text;
  int rank = 0;
  for (int b = 0; b < 256; ++b)
    text += base64(std::string(1, static_cast<char>(b))) +
            fmt::format(" {}\n", rank++);
  for (const char* token : {"he", " he", "hexa"})
    text += base64(token) + fmt::format(" {}\n", rank++);
  for (int i = 0; rank < ranks; ++i)
    text += base64({'\1', static_cast<char>(i >> 16), static_cast<char>(i >> 8),
                    static_cast<char>(i)}) +
            fmt::format(" {}\n", rank++);
  return text;
}

TEST(Tiktoken, RanksAreIdsAndSpecialTokensFollow) {
  ASSERT_OK_AND(const auto t, parse_tiktoken(tiktoken(50256), "t"));
  EXPECT_EQ(t->vocab_size(), 50257);
  EXPECT_EQ(t->end_of_text(), 50256);
  EXPECT_EQ(encode(*t, "he he"), (Tokens{256, 257}));
  // "hexa" has no merges that lead to it.
  EXPECT_EQ(encode(*t, "hexa hexa"), (Tokens{258, 257, 'x', 'a'}));
  EXPECT_EQ(encode(*t, "he<|endoftext|>", {.special = true}),
            (Tokens{256, 50256}));
  EXPECT_EQ(encode(*t, "<|endoftext|>").size(), 13U);
  EXPECT_TRUE(t->id().starts_with("gpt2:")) << t->id();

  ASSERT_OK_AND(const auto llama, parse_tiktoken(tiktoken(128000), "t"));
  EXPECT_EQ(llama->vocab_size(), 128256);
  EXPECT_EQ(llama->end_of_text(), 128001);
  EXPECT_EQ(llama->decode(Tokens{128000, 256, 257, 128009}).value(),
            "<|begin_of_text|>he he<|eot_id|>");
  EXPECT_TRUE(llama->id().starts_with("llama3:")) << llama->id();
}

// They divide text differently: o200k ends a piece before a capital letter.
TEST(Tiktoken, LaterVocabulariesHaveGapsBeforeTheirSpecialTokens) {
  const auto cl100k = parse_tiktoken(tiktoken(100256), "t");
  ASSERT_TRUE(cl100k.ok()) << cl100k.status().to_string();
  EXPECT_EQ((*cl100k)->vocab_size(), 100277);
  EXPECT_EQ((*cl100k)->end_of_text(), 100257);
  EXPECT_EQ(encode(**cl100k, "hexaHe<|fim_suffix|>", {.special = true}),
            (Tokens{256, 'x', 'a', 'H', 'e', 100260}));
  EXPECT_TRUE((*cl100k)->id().starts_with("cl100k:")) << (*cl100k)->id();

  const auto o200k = parse_tiktoken(tiktoken(199998), "t");
  ASSERT_TRUE(o200k.ok()) << o200k.status().to_string();
  EXPECT_EQ((*o200k)->vocab_size(), 200019);
  EXPECT_EQ((*o200k)->end_of_text(), 199999);
  EXPECT_EQ(encode(**o200k, "hexaHe<|endofprompt|>", {.special = true}),
            (Tokens{258, 'H', 'e', 200018}));
  EXPECT_TRUE((*o200k)->id().starts_with("o200k:")) << (*o200k)->id();
}

TEST(Tiktoken, InvalidFilesAreRefused) {
  const auto says = [](const std::string& text, const std::string& expected) {
    EXPECT_SAYS(parse_tiktoken(text, "t"), expected);
  };
  says("YQ== 0\nYg==\n", "t: line 2: expected a token");
  for (const char* text : {"YQ= 0", "Y*== 0", "YR== 0", "YQ== 1", "YQ== 0x",
                           "YQ==", " 0", "YQ== 99999999999999999999"})
    says(text, "t: line 1: expected a token of 1 to 1024 bytes");
  says(std::string(4000, 'A') + " 0\n", "line 1");
  says("YQ== 0\n", "1 tokens is not supported: expected 50256");
  says("", "0 tokens");
  says(tiktoken(199999), "t: line 199999: at most 199998 tokens are supported");
  std::string twice = tiktoken(50256);
  twice.replace(twice.find("AQAAAA== 259"), 8, "AQAAAQ==");
  says(twice, "tokens 259 and 260 are equal");
}

TEST(OpenTokenizer, TellsFormatsByTheirContents) {
  const TempDir dir;
  ASSERT_OK_AND(const auto json,
                open_tokenizer(dir.write("a", sentencepiece_like().dump())));
  EXPECT_EQ(json->end_of_text(), 2);
  EXPECT_OK(open_tokenizer(dir.write("b", tiktoken(50256))));
  EXPECT_EQ(open_tokenizer(dir.write("c", "something")).status().code(),
            Code::kInvalidArgument);
  const Status missing = open_tokenizer("byte").status();
  EXPECT_EQ(missing.code(), Code::kNotFound);
  EXPECT_SAYS(missing, "expected bytes");
  EXPECT_SAYS(open_tokenizer(dir.path()), "is a folder: expected bytes");
}

TEST(OpenTokenizer, TheConfigBesideItMayNameWhatEndsADocument) {
  const TempDir dir;
  Json json = byte_level();
  json["added_tokens"][0]["content"] = "[EOS]";
  const std::string file = dir.write("t.json", json.dump());
  const auto with = [&](const char* config) {
    dir.write("tokenizer_config.json", config);
    return open_tokenizer(file);
  };
  const std::string why = "or the eos_token in a tokenizer_config.json beside";
  EXPECT_SAYS(open_tokenizer(file), why);
  for (const char* config :
       {"{", "[]", R"({"eos_token": null})", R"({"eos_token": "[OTHER]"})",
        R"({"bos_token": "[EOS]"})", R"({"content": "[EOS]"})"})
    EXPECT_SAYS(with(config), why) << config;
  for (const char* config :
       {R"({"eos_token": "[EOS]"})",
        R"({"eos_token": {"content": "[EOS]", "lstrip": false}})"}) {
    ASSERT_OK_AND(const auto t, with(config));
    EXPECT_EQ(t->end_of_text(), 258) << config;
    EXPECT_TRUE(t->id().starts_with("tokenizer.json:end=258:")) << t->id();
  }
  std::filesystem::remove(dir.path() + "/tokenizer_config.json");
  std::filesystem::create_directory(dir.path() + "/tokenizer_config.json");
  EXPECT_SAYS(open_tokenizer(file), "tokenizer_config.json: ");
  std::filesystem::remove(dir.path() + "/tokenizer_config.json");
  // A usual one ends documents; that of a chat model ends turns.
  json = byte_level();
  json["added_tokens"].push_back(
      {{"id", 259}, {"content", "<|im_end|>"}, {"special", true}});
  for (const bool special : {true, false}) {
    json["added_tokens"][0]["special"] = special;
    dir.write("t.json", json.dump());
    ASSERT_OK_AND(const auto t, with(R"({"eos_token": "<|im_end|>"})"));
    EXPECT_EQ(t->end_of_text(), 258);
  }
}

}  // namespace
}  // namespace remesh::tokenizer
