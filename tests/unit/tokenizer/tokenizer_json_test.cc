#include "worker/tokenizer/tokenizer_json.h"

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/testing/expect.h"
#include "tests/testing/seed.h"
#include "tests/unit/tokenizer/encode.h"
#include "tests/unit/tokenizer/small_models.h"

namespace remesh::tokenizer {
namespace {

std::unique_ptr<Tokenizer> parse(const Json& json) {
  auto t = parse_tokenizer_json(json.dump(), "t.json");
  EXPECT_OK(t);
  return t.ok() ? std::move(*t) : nullptr;
}

// The error after a change of a valid file.
std::string problem(Json json, const std::function<void(Json&)>& change) {
  change(json);
  return parse_tokenizer_json(json.dump(), "t.json").status().message();
}

Json replaces(const Json& pattern, const std::string& content) {
  return {{"type", "Replace"}, {"pattern", pattern}, {"content", content}};
}

Json sequence(const Json& components, const char* key) {
  return {{"type", "Sequence"}, {key, components}};
}

Json strips(bool left, bool right) {
  return {{"type", "Strip"}, {"strip_left", left}, {"strip_right", right}};
}

// Byte-level BPE with one more added token, 259, and a normalizer.
Json with_token(Json token, const Json& normalizer = nullptr) {
  Json json = byte_level();
  token["id"] = 259;
  json["added_tokens"].push_back(token);
  json["normalizer"] = normalizer;
  return json;
}

TEST(TokenizerJson, SentencePieceLike) {
  const auto t = parse(sentencepiece_like());
  const int32_t space = 259;  // the first character
  EXPECT_EQ(t->vocab_size(), 271);
  EXPECT_EQ(t->end_of_text(), 2);
  EXPECT_EQ(encode(*t, "hello"), (Tokens{space + 10}));
  EXPECT_EQ(encode(*t, " hello"), (Tokens{space + 5, space + 9}));
  EXPECT_EQ(encode(*t, "he\n"), (Tokens{space, space + 6, 3 + '\n'}));
  EXPECT_EQ(encode(*t, ""), (Tokens{}));
  EXPECT_EQ(encode(*t, "hello", {.continues = true}), (Tokens{space + 9}));
  EXPECT_EQ(encode(*t, "h<tool>h"),
            (Tokens{space, space + 1, 270, space, space + 1}));
  // The special token is text, unless it is asked for.
  EXPECT_EQ(encode(*t, "</s>", {.special = true}), (Tokens{2}));
  EXPECT_EQ(encode(*t, "</s>").size(), 5U);
  EXPECT_EQ(t->decode(Tokens{space + 10, space + 10}).value(), "hello hello");
  // What follows a prompt.
  TextStream rest(*t, /*begins=*/false);
  std::string text;
  ASSERT_OK(rest.add(space + 10, text));
  EXPECT_EQ(text, " hello");
}

TEST(TokenizerJson, ByteLevel) {
  const auto t = parse(byte_level());
  EXPECT_EQ(t->vocab_size(), 259);
  EXPECT_EQ(t->end_of_text(), 258);
  EXPECT_EQ(encode(*t, "he he"), (Tokens{256, 257}));
  EXPECT_EQ(encode(*t, "<|endoftext|>", {.special = true}), (Tokens{258}));
  EXPECT_EQ(encode(*t, "<|endoftext|>").size(), 13U);
}

TEST(TokenizerJson, AnyBytesComeBack) {
  for (const Json& json : {sentencepiece_like(), byte_level()}) {
    const auto t = parse(json);
    std::mt19937 rng(test_seed());
    const std::vector<std::string> snippets = {"hello",  " ",
                                               "  ",     "\n",
                                               "é",      "\U0001F600",
                                               "\xFF",   "\xE2\x96",
                                               "</s>",   "<|endoftext|>",
                                               "12",     "'ll",
                                               "<tool>", std::string(1, '\0')};
    for (int i = 0; i < 2000; ++i) {
      std::string text;
      for (size_t n = rng() % 40; n > 0; --n) {
        if (rng() % 4 == 0)
          text.push_back(static_cast<char>(rng()));
        else
          text += snippets[rng() % snippets.size()];
      }
      if (text.find("\u2581") != std::string::npos) continue;  // is a space
      // Llama 2 begins the text after an added token with a space.
      if (json["normalizer"].is_object() &&
          text.find("<tool>") != std::string::npos)
        continue;
      EXPECT_EQ(t->decode(encode(*t, text)).value(), text);
    }
  }
}

TEST(TokenizerJson, BothFormsOfMerges) {
  Json json = byte_level();
  json["model"]["merges"] = {"h e", "Ġ he"};
  EXPECT_EQ(encode(*parse(json), "he he"), (Tokens{256, 257}));
}

TEST(TokenizerJson, IgnoreMergesTakesWholePieces) {
  Json json = byte_level();
  json["model"]["vocab"]["hexa"] = 259;
  EXPECT_EQ(encode(*parse(json), "hexa"), (Tokens{256, 'x', 'a'}));
  json["model"]["ignore_merges"] = true;
  EXPECT_EQ(encode(*parse(json), "hexa"), (Tokens{259}));
}

TEST(TokenizerJson, TheEndOfTextIsFoundByName) {
  Json json = sentencepiece_like();
  json["added_tokens"].push_back({{"id", 271}, {"content", "<|end_of_text|>"}});
  json["added_tokens"][2]["special"] = true;
  EXPECT_EQ(parse(json)->end_of_text(), 271);
  // Of Gemma, </s> is a tag in texts.
  json["added_tokens"][0]["special"] = false;
  json["added_tokens"][0]["normalized"] = false;
  json["added_tokens"][2]["content"] = "<eos>";
  EXPECT_EQ(parse(json)->end_of_text(), 271);
  for (const char* other :
       {"<\uFF5Cend\u2581of\u2581sentence\uFF5C>", "<EOS_TOKEN>"}) {
    json = byte_level();
    json["added_tokens"][0]["content"] = other;
    EXPECT_EQ(parse(json)->end_of_text(), 258) << other;
  }
  EXPECT_HAS(problem(byte_level(), [](Json& j) { j.erase("added_tokens"); }),
             "no token ends a document: expected one of <|endoftext|>");
}

// Metaspace does what Llama 2's normalizer does, and its decoder takes back
// exactly the space that was added.
TEST(TokenizerJson, Metaspace) {
  const Json llama = sentencepiece_like();
  for (const char* scheme : {"always", "first", "never"}) {
    Json json = llama;
    json["normalizer"] = nullptr;
    json["pre_tokenizer"] = {{"type", "Metaspace"},
                             {"replacement", "\u2581"},
                             {"prepend_scheme", scheme},
                             {"split", false}};
    if (scheme == std::string("never")) json["decoder"]["decoders"].erase(3);
    const auto t = parse(json);
    for (const std::string text :
         {"hello", " hello", "  hello", "he  lo ", " ", "\nh"}) {
      if (scheme == std::string("never"))
        EXPECT_EQ(encode(*t, text),
                  encode(*parse(llama), text, {.continues = true}));
      else
        EXPECT_EQ(encode(*t, text), encode(*parse(llama), text));
      EXPECT_EQ(t->decode(encode(*t, text)).value(), text) << scheme;
    }
    // Only "always" adds a space after an added token.
    EXPECT_EQ(encode(*t, "<tool>hello").size(), 2U) << scheme;
    const bool spaced = encode(*t, "<tool>hello").back() == 269;
    EXPECT_EQ(spaced, scheme == std::string("always"));
    json["decoder"] = {{"type", "Metaspace"}, {"prepend_scheme", scheme}};
    EXPECT_EQ(parse(json)->decode(Tokens{269}).value(),
              scheme == std::string("never") ? " hello" : "hello");
  }
}

// One that splits begins a piece at each mark, as the library does.
TEST(TokenizerJson, MetaspaceMaySplit) {
  Json json = sentencepiece_like();
  json["normalizer"] = nullptr;
  json["pre_tokenizer"] = {{"type", "Metaspace"}, {"split", false}};
  EXPECT_EQ(encode(*parse(json), " hello"), (Tokens{264, 268}));
  json["pre_tokenizer"].erase("split");
  EXPECT_EQ(encode(*parse(json), " hello"), (Tokens{259, 269}));
  EXPECT_EQ(parse(json)->decode(Tokens{259, 269}).value(), " hello");
}

// The parts of a conversation are encoded one by one, as if at once.
TEST(TokenizerJson, ATextAfterAnAddedTokenGetsAMarkAgain) {
  const auto t = parse(sentencepiece_like());
  for (const bool special : {true, false}) {
    Tokens parts = encode(*t, "hello<tool>", {.special = special});
    EXPECT_TRUE(t->restarts_after(parts.back()));
    for (const int32_t token :
         encode(*t, "hello",
                {.special = special, .continues = true, .after_added = true}))
      parts.push_back(token);
    EXPECT_EQ(parts, encode(*t, "hello<tool>hello", {.special = special}));
  }
  EXPECT_FALSE(t->is_added(encode(*t, "hello").back()));
}

// Gemma adds runs of marks, which also result from merges.
TEST(TokenizerJson, AddedMarksAreSpaces) {
  Json json = sentencepiece_like();
  const int id = json["model"]["vocab"]["\u2581\u2581"].get<int>();
  json["added_tokens"].push_back(
      {{"id", id}, {"content", "\u2581\u2581"}, {"normalized", false}});
  const auto t = parse(json);
  for (const std::string text : {"hello  hello", "he    he", "  he"})
    EXPECT_EQ(t->decode(encode(*t, text)).value(), text);
}

TEST(TokenizerJson, WithoutANormalizerNothingStandsForASpace) {
  Json json = sentencepiece_like();
  json["normalizer"] = nullptr;
  json["decoder"] = nullptr;
  const auto t = parse(json);
  EXPECT_EQ(encode(*t, " \u2581h"), (Tokens{3 + ' ', 259, 260}));
  EXPECT_EQ(t->decode(Tokens{3 + ' ', 259, 260}).value(), " \u2581h");
}

// A piece is divided before its spaces, unless a merge crosses one.
TEST(TokenizerJson, AMergeMayCrossASpace) {
  Json json = sentencepiece_like();
  const auto whole = encode(*parse(json), "h h");
  EXPECT_EQ(whole, (Tokens{259, 260, 259, 260}));
  json["model"]["vocab"]["h\u2581"] = 270;
  json["added_tokens"].erase(1);
  json["model"]["merges"].push_back("h \u2581");
  EXPECT_EQ(encode(*parse(json), "h h"), (Tokens{259, 270, 260}));
}

std::vector<int32_t> bytes_of(const std::string& text) {
  Tokens out;
  for (const char c : text) out.push_back(static_cast<unsigned char>(c));
  return out;
}

// "he" is 256, " he" 257.
TEST(TokenizerJson, ANormalizerChangesTheText) {
  const auto tokens = [](const Json& normalizer, const std::string& text,
                         const EncodeOptions& options = {}) {
    Json json = byte_level();
    json["normalizer"] = normalizer;
    return encode(*parse(json), text, options);
  };
  const auto kind = [](const char* name) { return Json{{"type", name}}; };
  EXPECT_EQ(tokens(kind("Lowercase"), "HE He"), (Tokens{256, 257}));
  EXPECT_EQ(tokens(kind("NFKC"), "\uFF48\uFF45\u00E9"),
            (Tokens{256, 0xC3, 0xA9}));
  EXPECT_EQ(tokens(kind("NFKD"), "\uFF48\uFF45\u0301"),
            (Tokens{256, 0xCC, 0x81}));
  EXPECT_EQ(tokens(kind("NFD"), "\u00E9"), (Tokens{'e', 0xCC, 0x81}));
  // Every match from left to right; what is put in does not match again.
  EXPECT_EQ(tokens(replaces({{"String", "ab"}}, "b"), "aabb"), bytes_of("abb"));
  EXPECT_EQ(tokens(replaces({{"String", "."}}, ""), "a.b"), bytes_of("ab"));
  EXPECT_EQ(tokens(replaces({{"Regex", "\\s+"}}, "$1"), "a \u3000\nb\t"),
            bytes_of("a$1b$1"));
  // In their order.
  const Json to_upper = replaces({{"String", "a"}}, "B");
  EXPECT_EQ(tokens(sequence({kind("Lowercase"), to_upper}, "normalizers"), "A"),
            bytes_of("B"));
  EXPECT_EQ(tokens(sequence({to_upper, kind("Lowercase")}, "normalizers"), "A"),
            bytes_of("a"));
}

TEST(TokenizerJson, StripRemovesSpaceWhereATextBeginsAndEnds) {
  const auto tokens = [](bool left, bool right, const std::string& text,
                         const EncodeOptions& options = {}) {
    const Json token = {{"content", "<t>"}, {"normalized", false}};
    return encode(*parse(with_token(token, strips(left, right))), text,
                  options);
  };
  const std::string text = " \u3000\the\n ";
  EXPECT_EQ(tokens(true, true, text), (Tokens{256}));
  EXPECT_EQ(tokens(true, false, text), (Tokens{256, '\n', ' '}));
  EXPECT_EQ(tokens(false, true, "\nhe "), (Tokens{'\n', 256}));
  EXPECT_EQ(tokens(true, true, " \n "), (Tokens{}));
  // Not in the middle of a document.
  EXPECT_EQ(tokens(true, true, "he ", {.continued = true}), (Tokens{256, ' '}));
  EXPECT_EQ(tokens(true, true, " he ", {.continues = true}), (Tokens{257}));
  EXPECT_EQ(tokens(true, true, " he", {.continues = true, .after_added = true}),
            (Tokens{256}));
  // What is between added tokens is a text of its own.
  EXPECT_EQ(
      tokens(true, true, " he <t> he ", {.continues = true, .continued = true}),
      (Tokens{257, 259, 256, ' '}));
}

// The parts of the text that decoding cannot restore are named.
TEST(TokenizerJson, WhatIsLostIsNamed) {
  Json json = byte_level();
  EXPECT_EQ(parse(json)->changes(), "");
  json["normalizer"] = sequence(
      {{{"type", "NFC"}}, {{"type", "Lowercase"}}, strips(true, false)},
      "normalizers");
  json["pre_tokenizer"]["add_prefix_space"] = true;
  EXPECT_EQ(parse(json)->changes(), "Lowercase, Strip, add_prefix_space");
  json = sentencepiece_like();
  EXPECT_EQ(parse(json)->changes(), "");
  json["model"]["byte_fallback"] = false;
  EXPECT_EQ(parse(json)->changes(), "unk_token");
}

TEST(TokenizerJson, TheDecoderMayReplaceBack) {
  Json json = byte_level();
  json["normalizer"] = replaces({{"String", "-"}}, "_");
  json["decoder"] = sequence(
      {replaces({{"Regex", "_"}}, "-"), {{"type", "ByteLevel"}}}, "decoders");
  const auto t = parse(json);
  EXPECT_EQ(encode(*t, "he-he"), (Tokens{256, '_', 256}));
  EXPECT_EQ(t->decode(Tokens{256, '_', 256}).value(), "he-he");
}

TEST(TokenizerJson, ATextDoesNotGrowWithoutLimit) {
  Json json = byte_level();
  const auto times = [](size_t n) {
    return replaces({{"String", "a"}}, std::string(n, 'a'));
  };
  for (const Json& normalizer :
       {times(1 << 21), sequence(Json(40, times(2)), "normalizers")}) {
    json["normalizer"] = normalizer;
    Tokens tokens;
    EXPECT_SAYS(parse(json)->encode("a", {}, tokens),
                "makes a text of 1 bytes longer than 1048592 bytes");
  }
  EXPECT_HAS(problem(byte_level(),
                     [&](Json& j) {
                       j["decoder"] = sequence(
                           {times(1025), {{"type", "ByteLevel"}}}, "decoders");
                     }),
             "token 97: stands for 1025 bytes; at most 1024");
}

TEST(TokenizerJson, ByteLevelMayAddASpace) {
  Json json = with_token({{"content", "<t>"}, {"normalized", false}});
  json["pre_tokenizer"]["add_prefix_space"] = true;
  const auto t = parse(json);
  EXPECT_EQ(encode(*t, "he"), (Tokens{257}));
  EXPECT_EQ(encode(*t, " he"), (Tokens{257}));
  EXPECT_EQ(encode(*t, "  he"), (Tokens{' ', 257}));
  EXPECT_EQ(encode(*t, ""), (Tokens{}));
  EXPECT_EQ(encode(*t, "he", {.continues = true}), (Tokens{256}));
  EXPECT_EQ(encode(*t, "he", {.continues = true, .after_added = true}),
            (Tokens{257}));
  EXPECT_EQ(encode(*t, "he<t>he"), (Tokens{257, 259, 257}));
  for (const std::string text : {"he", "\nhe he", "\u00E9"})
    EXPECT_EQ(t->decode(encode(*t, text)).value(), text);
}

// As sentencepiece_like(): <unk> 0, the mark 259, h 260, o 263, two marks 264.
TEST(TokenizerJson, WithoutByteFallbackOneTokenIsForWhatIsUnknown) {
  Json json = sentencepiece_like();
  json["model"]["byte_fallback"] = false;
  EXPECT_EQ(encode(*parse(json), "hxyo x\n y"),
            (Tokens{259, 260, 0, 263, 259, 0, 259, 0}));
  json["model"]["fuse_unk"] = false;
  const auto t = parse(json);
  EXPECT_EQ(encode(*t, "hxyo"), (Tokens{259, 260, 0, 0, 263}));
  EXPECT_EQ(t->decode(Tokens{259, 260, 0, 3}).value(), "h<unk><0x00>");
  // Of bytes, too.
  json = byte_level();
  json["model"]["vocab"].erase("x");
  json["model"]["vocab"]["<unk>"] = 300;
  json["model"]["unk_token"] = "<unk>";
  EXPECT_EQ(encode(*parse(json), "hexx"), (Tokens{256, 300, 300}));
  json["model"]["unk_token"] = "<other>";
  Tokens tokens;
  EXPECT_SAYS(parse(json)->encode("hex", {}, tokens), "no token for the byte");
}

// Texts are divided before marks only if those have a token.
TEST(TokenizerJson, UnknownMarksAreJoinedToWhatIsBesideThem) {
  Json json = sentencepiece_like();
  json["normalizer"] = json["normalizer"]["normalizers"][1];
  json["decoder"]["decoders"].erase(3);
  json["model"]["byte_fallback"] = false;
  json["model"]["merges"] = Json::array();
  for (const char* token : {"\u2581", "\u2581\u2581", "\u2581hello"})
    json["model"]["vocab"].erase(token);
  EXPECT_EQ(encode(*parse(json), "hx x xh x"), (Tokens{260, 0, 260, 0}));
}

TEST(TokenizerJson, ASingleWordHasNoCharacterOfAWordBesideIt) {
  const auto t = parse(with_token({{"content", "cat"}, {"single_word", true}}));
  Tokens expected = {259, '-', 259, ' '};
  const std::string rest = "catcat_cat cats \u00E9cat cat\u0301 ";
  for (const int32_t b : bytes_of(rest)) expected.push_back(b);
  expected.push_back(259);
  EXPECT_EQ(encode(*t, "cat-cat " + rest + "cat"), expected);
}

TEST(TokenizerJson, NormalizedTokensAreFoundInNormalizedText) {
  const Json lowercase = {{"type", "Lowercase"}};
  Tokens expected = bytes_of("i saw ");
  expected.push_back(259);
  auto t = parse(with_token({{"content", "Day"}}, lowercase));
  EXPECT_EQ(encode(*t, "I saw DAY"), expected);
  EXPECT_EQ(t->decode(expected).value(), "i saw day");
  t = parse(with_token({{"content", "Day"}, {"normalized", false}}, lowercase));
  EXPECT_EQ(encode(*t, "I saw Day"), expected);
  EXPECT_EQ(encode(*t, "I saw DAY"), bytes_of("i saw day"));
  // Others are found before them.
  Json json = with_token({{"content", "<a>"}, {"normalized", false}});
  json["added_tokens"].push_back({{"id", 260}, {"content", "x<a>"}});
  EXPECT_EQ(encode(*parse(json), "x<a>"), (Tokens{'x', 259}));
}

// Of Llama 2, whose normalizer gives the token a mark, as it does texts.
TEST(TokenizerJson, ANormalizedTokenMayHaveAMark) {
  Json json = sentencepiece_like();
  json["added_tokens"][1].erase("normalized");
  const auto t = parse(json);
  EXPECT_EQ(encode(*t, "h <tool>h"), (Tokens{259, 260, 270, 260}));
  EXPECT_EQ(t->decode(Tokens{259, 260, 270, 260}).value(), "h <tool>h");
  EXPECT_TRUE(t->is_added(270));
  EXPECT_FALSE(t->restarts_after(270));
  EXPECT_EQ(encode(*t, "h<tool>"),
            (Tokens{259, 260, 3 + '<', 3 + 't', 263, 263, 262, 3 + '>'}));
}

TEST(TokenizerJson, AddedTokensAreTheLeftmostAndThenLongest) {
  Json json = byte_level();
  int id = 258;
  for (const char* text : {"<a", "<a>", "a>b", "<a>bcd"})
    json["added_tokens"].push_back({{"id", ++id}, {"content", text}});
  json["added_tokens"].push_back({{"id", ++id},
                                  {"content", "<m>"},
                                  {"special", true},
                                  {"lstrip", true},
                                  {"rstrip", true}});
  const auto t = parse(json);
  EXPECT_EQ(encode(*t, "x<a>b<ay<a>bcd<"),
            (Tokens{'x', 260, 'b', 259, 'y', 262, '<'}));
  EXPECT_EQ(encode(*t, "a \t<m>\u3000\n<m> b", {.special = true}),
            (Tokens{'a', 263, 263, 'b'}));
  EXPECT_EQ(encode(*t, " <m>"), (Tokens{' ', '<', 'm', '>'}));
  EXPECT_EQ(encode(*t, "<m<a", {.special = true}), (Tokens{'<', 'm', 259}));
}

// As Falcon: punctuation, the pattern of GPT-2, then digits of the alphabet, in
// which the bytes B2 and B3 are digits, and three of them.
TEST(TokenizerJson, StepsAfterByteLevelSeeItsAlphabet) {
  Json json = byte_level();
  json["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Punctuation"}, {"behavior", "Contiguous"}},
        {{"type", "ByteLevel"}, {"add_prefix_space", false}},
        {{"type", "Digits"}, {"individual_digits", false}},
        {{"type", "Split"},
         {"pattern", {{"Regex", "[0-9][0-9][0-9]"}}},
         {"behavior", "Isolated"}}}}};
  int id = 258;
  json["added_tokens"][0]["id"] = 400;
  for (const char* pair : {"3 4", "1 2", "12 3", "! !", "Ġ !", "Ã ²", "a 1"}) {
    std::string text = pair;
    json["model"]["merges"].push_back(text);
    text.erase(text.find(' '), 1);
    json["model"]["vocab"][text] = id++;
  }
  const auto t = parse(json);
  EXPECT_EQ(encode(*t, "a1234 !!\u00F2"),
            (Tokens{'a', 260, '4', ' ', 261, 0xC3, 0xB2}));
}

// The pieces of "a..b.ab". Where two dots, a letter and a dot, or two letters
// are merged shows where pieces end.
std::string pieces_of(const Json& pre_tokenizer) {
  Json json = byte_level();
  json["pre_tokenizer"] = sequence({pre_tokenizer,
                                    {{"type", "ByteLevel"},
                                     {"add_prefix_space", false},
                                     {"use_regex", false}}},
                                   "pretokenizers");
  json["added_tokens"][0]["id"] = 400;
  int id = 258;
  for (const char* pair : {". .", "a .", ". b", "a b"}) {
    std::string text = pair;
    json["model"]["merges"].push_back(text);
    text.erase(text.find(' '), 1);
    json["model"]["vocab"][text] = id++;
  }
  const auto t = parse(json);
  std::string out;
  for (const int32_t token : encode(*t, "a..b.ab"))
    out += std::string(t->token_bytes(token).value()) + "|";
  if (t->changes().empty())
    EXPECT_EQ(t->decode(encode(*t, "a..b.ab\xFF")).value(), "a..b.ab\xFF");
  else
    EXPECT_EQ(t->changes(), pre_tokenizer["type"].get<std::string>());
  return out;
}

Json splits(const Json& pattern, const char* behavior, bool invert) {
  return {{"type", "Split"},
          {"pattern", pattern},
          {"behavior", behavior},
          {"invert", invert}};
}

TEST(TokenizerJson, ASplitDividesAsItsBehaviorSays) {
  for (const Json& dot : {Json{{"String", "."}}, Json{{"Regex", "\\."}}})
    for (const bool invert : {false, true}) {
      const auto pieces = [&](const char* behavior) {
        return pieces_of(splits(dot, behavior, invert));
      };
      EXPECT_EQ(pieces("Isolated"), "a|.|.|b|.|ab|");
      EXPECT_EQ(pieces("Contiguous"), "a|..|b|.|ab|");
      EXPECT_EQ(pieces("MergedWithPrevious"),
                invert ? "a|.|.b|.|ab|" : "a.|.|b|.|ab|");
      EXPECT_EQ(pieces("MergedWithNext"),
                invert ? "a.|.|b|.|ab|" : "a|.|.b|.|ab|");
    }
  EXPECT_EQ(pieces_of(splits({{"Regex", "[a-z]+|\\.+"}}, "Removed", true)),
            "a|..|b|.|ab|");
  // What is on both sides of a match is not joined.
  EXPECT_EQ(pieces_of(splits({{"Regex", "\\.+"}}, "Removed", false)),
            "a|b|ab|");
  EXPECT_EQ(pieces_of(splits({{"String", "a..b.ab"}}, "Removed", false)), "");
}

TEST(TokenizerJson, PunctuationDividesAsASplitOfIt) {
  for (const char* behavior : {"Isolated", "Contiguous", "MergedWithPrevious",
                               "MergedWithNext", "Removed"})
    EXPECT_EQ(pieces_of({{"type", "Punctuation"}, {"behavior", behavior}}),
              pieces_of(splits({{"String", "."}}, behavior, false)));
  EXPECT_EQ(pieces_of(Json{{"type", "Punctuation"}}), "a|.|.|b|.|ab|");
}

TEST(TokenizerJson, ASplitDividesLongTexts) {
  for (const char* behavior :
       {"Contiguous", "MergedWithPrevious", "MergedWithNext"}) {
    Json json = byte_level();
    json["pre_tokenizer"] = {
        {"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Split"},
           {"pattern", {{"Regex", "[a-m]"}}},
           {"behavior", behavior}},
          {{"type", "ByteLevel"}, {"add_prefix_space", false}}}}};
    const auto t = parse(json);
    for (const char c : {'a', 'z'})
      EXPECT_EQ(encode(*t, std::string(200'000, c)).size(), 200'000U)
          << behavior;
  }
}

TEST(TokenizerJson, TheIdentityIsThatOfTheFile) {
  const auto a = parse(byte_level());
  Json json = byte_level();
  EXPECT_EQ(a->id(), parse(json)->id());
  json["version"] = "1.0";
  EXPECT_NE(a->id(), parse(json)->id());
  EXPECT_LT(a->id().size(), 64U);
  EXPECT_TRUE(a->id().starts_with("tokenizer.json:")) << a->id();
}

TEST(TokenizerJson, WhatIsNotSupportedIsNamed) {
  const auto says = [](const std::function<void(Json&)>& change,
                       const std::string& expected) {
    for (const Json& json : {byte_level(), sentencepiece_like()}) {
      const std::string message = problem(json, change);
      EXPECT_HAS(message, expected);
      EXPECT_TRUE(message.starts_with("t.json: ")) << message;
    }
  };
  for (const char* kind : {"Unigram", "WordPiece", "WordLevel"})
    says([&](Json& j) { j["model"]["type"] = kind; },
         std::string("model \"") + kind + "\" is not supported: expected BPE");
  for (const Json& component :
       {Json{{"type", "Precompiled"}}, Json{{"type", "StripAccents"}},
        Json{{"type", "Prepend"}, {"prepend", "_"}}})
    says([&](Json& j) { j["normalizer"] = component; },
         "normalizer " + component.dump() + " is not supported");
  for (const Json& pattern : {Json{{"String", ""}}, Json{{"Regex", "a*"}}})
    says([&](Json& j) { j["normalizer"] = replaces(pattern, "b"); },
         ", " + replaces(pattern, "b").dump() + " is not supported");
  for (const Json& component :
       {Json{{"type", "WhitespaceSplit"}},
        Json{{"type", "Punctuation"}, {"behavior", "Other"}},
        Json{{"type", "Split"},
             {"pattern", {{"String", "a"}}},
             {"behavior", "Other"}}})
    says([&](Json& j) { j["pre_tokenizer"] = component; },
         "pre_tokenizer " + component.dump() + " is not supported");
  says(
      [](Json& j) {
        j["decoder"] = {{"type", "WordPiece"}};
      },
      "decoder {\"type\":\"WordPiece\"} is not supported");
  says([](Json& j) { j["decoder"] = nullptr; }, "decoder null: does not undo");
  says([](Json& j) { j["model"]["dropout"] = 0.1; }, "dropout 0.1");
  says([](Json& j) { j["model"]["continuing_subword_prefix"] = "##"; },
       "continuing_subword_prefix \"##\"");
  says(
      [](Json& j) {
        j["pre_tokenizer"] = {{"type", "Split"},
                              {"pattern", {{"Regex", "("}}},
                              {"behavior", "Isolated"}};
      },
      "pattern '('");
  says(
      [](Json& j) {
        const Json digits = {{"type", "Digits"}};
        j["pre_tokenizer"] =
            sequence({digits, {{"type", "ByteLevel"}}}, "pretokenizers");
      },
      "after another one, pre_tokenizer {\"type\":\"ByteLevel\"}");
  says(
      [](Json& j) {
        j["decoder"] = sequence(
            {{{"type", "Fuse"}}, replaces({{"String", "a"}}, "b")}, "decoders");
      },
      "decoder {\"content\":\"b\"");
  says(
      [](Json& j) {
        j["normalizer"] = {{"type", "Prepend"}, {"prepend", "\u2581"}};
        j["pre_tokenizer"] = {{"type", "Metaspace"}};
      },
      "pre_tokenizer {\"type\":\"Metaspace\"} is not supported");
  const auto of_llama = [](const std::function<void(Json&)>& change) {
    return problem(sentencepiece_like(), change);
  };
  for (const Json& unknown : {Json(), Json("<other>")})
    EXPECT_HAS(of_llama([&](Json& j) {
                 j["model"]["byte_fallback"] = false;
                 j["model"]["unk_token"] = unknown;
               }),
               "without byte_fallback and unk_token, BPE " + unknown.dump());
  EXPECT_HAS(of_llama([](Json& j) { j["decoder"]["decoders"].erase(3); }),
             "does not undo");
}

TEST(TokenizerJson, SomeIdsMayHaveNoToken) {
  Json json = byte_level();
  json["model"]["vocab"]["qq"] = 60'000;
  const auto t = parse(json);
  EXPECT_EQ(t->vocab_size(), 60'001);
  EXPECT_EQ(t->decode(Tokens{60'000}).value(), "qq");
}

TEST(TokenizerJson, InvalidFilesAreRefused) {
  const auto says = [](const std::function<void(Json&)>& change,
                       const std::string& expected) {
    EXPECT_HAS(problem(byte_level(), change), expected);
  };
  says([](Json& j) { j["model"].erase("vocab"); }, "key 'vocab' not found");
  says([](Json& j) { j["model"]["vocab"]["q"] = -1; }, "id -1");
  says([](Json& j) { j["model"]["vocab"]["qq"] = 5000000; }, "id 5000000");
  says([](Json& j) { j["model"]["vocab"]["qq"] = 70'000; },
       "token \"qq\": id 70000: must be an integer from 0 to 66056 "
       "where there are 260 tokens");
  says([](Json& j) { j["model"]["vocab"]["qq"] = 65; }, "has that id");
  says([](Json& j) { j["model"]["merges"].push_back("nope"); },
       "merge \"nope\": expected two tokens");
  says([](Json& j) { j["model"]["merges"].push_back("h q"); },
       "merge \"h q\": 'hq' is not in the vocabulary");
  says([](Json& j) { j["added_tokens"][0]["id"] = "x"; }, "must be number");
  const std::string longest(1024, 'a');
  const auto of_length = [&](const std::string& token) {
    return problem(byte_level(),
                   [&](Json& j) { j["model"]["vocab"][token] = 259; });
  };
  EXPECT_EQ(of_length(longest), "");
  const std::string too_long = "token \"" + longest.substr(0, 199) +
                               "...: has 1025 bytes; at most 1024 are allowed";
  EXPECT_EQ(of_length(longest + "a"), "t.json: " + too_long);
  says(
      [&](Json& j) {
        j["added_tokens"].push_back({{"id", 259}, {"content", longest + "a"}});
      },
      too_long);
  says([](Json& j) { j["model"]["merges"].push_back(std::string(2050, ' ')); },
       "...: expected two tokens of at most 1024 bytes");
  Json nested = byte_level()["pre_tokenizer"];
  for (int i = 0; i < 12; ++i)
    nested = {{"type", "Sequence"}, {"pretokenizers", {nested}}};
  says([&](Json& j) { j["pre_tokenizer"] = nested; }, "more than 8 sequences");
  const std::string deep =
      std::string(300'000, '[') + std::string(300'000, ']');
  EXPECT_SAYS(
      parse_tokenizer_json(
          R"({"normalizer": {"type": "X", "a": )" + deep + "}}", "t.json"),
      "t.json: nested more than 64 deep");
  for (const std::string& text : {std::string(), std::string("{"),
                                  std::string("[]"), std::string(100'000, '[')})
    EXPECT_FALSE(parse_tokenizer_json(text, "t.json").ok());
}

}  // namespace
}  // namespace remesh::tokenizer
