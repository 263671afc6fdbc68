// Everything before the model: characters and patterns.

#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/testing/expect.h"
#include "tests/testing/seed.h"
#include "worker/tokenizer/pipeline.h"
#include "worker/tokenizer/regex.h"
#include "worker/tokenizer/unicode.h"

namespace remesh::tokenizer {
namespace {

using Texts = std::vector<std::string>;

// The matches of a pattern, and in brackets what is between them.
Texts split(const Regex& regex, const std::string& text) {
  Texts out;
  size_t at = 0;
  Matcher matcher;
  const Status status =
      regex.for_each_match(text, matcher, [&](size_t begin, size_t end) {
        if (begin > at) out.push_back("[" + text.substr(at, begin - at) + "]");
        out.push_back(text.substr(begin, end - begin));
        at = end;
        return ok_status();
      });
  EXPECT_OK(status);
  if (at < text.size()) out.push_back("[" + text.substr(at) + "]");
  return out;
}

Texts split(const std::string& pattern, const std::string& text) {
  return split(Regex::compile(pattern).value(), text);
}

TEST(Unicode, CompletePrefixWithholdsOnlyWhatMayBecomeACharacter) {
  EXPECT_EQ(complete_prefix("a\xE2\x96"), 1U);
  EXPECT_EQ(complete_prefix("a\xE2\x96\x81"), 4U);
  EXPECT_EQ(complete_prefix("a\xF0\x9F\x98"), 1U);
  EXPECT_EQ(complete_prefix("a\xFF"), 2U);
  EXPECT_EQ(complete_prefix("\x80\x80\x80\x80"), 4U);
}

// Naive reference: decodes the bit patterns, then checks the code point.
bool naive_utf8(const std::string& s) {
  for (size_t i = 0; i < s.size();) {
    const auto b = static_cast<unsigned char>(s[i]);
    const size_t n = b < 0x80             ? 1
                     : (b & 0xE0) == 0xC0 ? 2
                     : (b & 0xF0) == 0xE0 ? 3
                     : (b & 0xF8) == 0xF0 ? 4
                                          : 0;
    if (n == 0 || i + n > s.size()) return false;
    uint32_t point = n == 1 ? b : b & (0xFFU >> (n + 1));
    for (size_t k = 1; k < n; ++k) {
      const auto c = static_cast<unsigned char>(s[i + k]);
      if ((c & 0xC0) != 0x80) return false;
      point = point << 6 | (c & 0x3F);
    }
    constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
    if (point < kLeast[n] || point > 0x10FFFF ||
        (point >= 0xD800 && point <= 0xDFFF))
      return false;
    i += n;
  }
  return true;
}

TEST(Unicode, ValidPrefixAgreesWithTheNaiveTwinOnRandomBytes) {
  const uint64_t seed = test_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 rng(seed);
  // Bytes at the bounds of the ranges make valid characters likely.
  const std::string bytes =
      "a\x7f\x80\x8f\x90\x9f\xa0\xbf\xc1\xc2\xdf\xe0\xe1\xed\xee\xef\xf0\xf1"
      "\xf4\xf5";
  int valid = 0;
  for (int trial = 0; trial < 200'000; ++trial) {
    std::string s;
    for (size_t n = 1 + rng() % 5; n > 0; --n) s += bytes[rng() % bytes.size()];
    ASSERT_EQ(valid_prefix(s) == s.size(), naive_utf8(s))
        << testing::PrintToString(s);
    if (!naive_utf8(s)) continue;
    ++valid;
    const std::string cut = s.substr(0, rng() % (s.size() + 1));
    ASSERT_EQ(complete_prefix(cut), valid_prefix(cut));
  }
  EXPECT_GT(valid, 1000);
}

TEST(Unicode, WhiteSpaceOnBothSides) {
  const std::string space = " \t\u3000\u00A0\n";
  EXPECT_EQ(leading_space(space + "x"), space.size());
  EXPECT_EQ(trailing_space("x" + space), space.size());
  EXPECT_EQ(leading_space(space), space.size());
  EXPECT_EQ(trailing_space(space), space.size());
  EXPECT_EQ(leading_space("\u200Bx "), 0U);
  EXPECT_EQ(trailing_space(" x\u200B"), 0U);
  EXPECT_EQ(trailing_space("\x80\x80"), 0U);
}

std::string to_nfc(std::string_view text) {
  return normalized(text, NormalForm::kC);
}

TEST(Unicode, NormalizationFormC) {
  EXPECT_EQ(to_nfc("e\u0301 plain e\u0301"), "\u00E9 plain \u00E9");
  EXPECT_EQ(to_nfc("\uFB01"), "\uFB01");
  EXPECT_EQ(to_nfc("e\u0301\xFF e\u0301"), "e\u0301\xFF \u00E9");
  EXPECT_EQ(to_nfc(""), "");
  // Marks are ordered by class, those of a class stay in their order.
  EXPECT_EQ(to_nfc("s\u0307\u0323\u0316"), "\u1E69\u0316");
  EXPECT_EQ(to_nfc("q\u0307\u0323\u0301"), "q\u0323\u0307\u0301");
  EXPECT_EQ(to_nfc("\u1100\u1161\u11A8"), "\uAC01");
}

TEST(Unicode, TheOtherNormalizationForms) {
  const std::string text = "\uFB01n\u00E9 \uAC01 \uFF21";
  EXPECT_EQ(normalized(text, NormalForm::kD),
            "\uFB01ne\u0301 \u1100\u1161\u11A8 \uFF21");
  EXPECT_EQ(normalized(text, NormalForm::kKD),
            "fine\u0301 \u1100\u1161\u11A8 A");
  EXPECT_EQ(normalized(text, NormalForm::kKC), "fin\u00E9 \uAC01 A");
  // A mark of half width is composed, too.
  EXPECT_EQ(normalized("\uFF76\uFF9E", NormalForm::kKC), "\u30AC");
  EXPECT_EQ(normalized("\u2460\u3000a\u2460\xFF", NormalForm::kKC),
            "1 a\u2460\xFF");
  // The character with the longest decomposition.
  EXPECT_EQ(normalized("\uFDFA", NormalForm::kKC),
            "\u0635\u0644\u0649 \u0627\u0644\u0644\u0647 "
            "\u0639\u0644\u064A\u0647 \u0648\u0633\u0644\u0645");
}

TEST(Unicode, LowerCaseOfEveryCharacterByItself) {
  EXPECT_EQ(lowercase("A1 \u00C9\xFF\u0130Z"), "a1 \u00E9\xFFi\u0307z");
  // Not the other form, which ends a word.
  EXPECT_EQ(lowercase("\u039F\u03A3"), "\u03BF\u03C3");
}

TEST(Unicode, CharactersOfWords) {
  for (const std::string c : {"a", "\u00E9", "\u0301", "7", "_", "\u200D",
                              "\u24B6", "\u4E00", "\u2160"}) {
    EXPECT_TRUE(begins_in_word(c + " ")) << c;
    EXPECT_TRUE(ends_in_word(" " + c)) << c;
  }
  for (const std::string c : {"", " ", "-", "\u2460", "\xFF", "\xE2\x96"}) {
    EXPECT_FALSE(begins_in_word(c + " a")) << c;
    EXPECT_FALSE(ends_in_word("a " + c)) << c;
  }
}

std::string repeated(size_t times, std::string_view text) {
  std::string out;
  for (size_t i = 0; i < times; ++i) out += text;
  return out;
}

// In quadratic time this would take hours. U+0F73 is two marks of different
// classes, and of class 0 itself.
TEST(Unicode, NormalizesManyMarksOfALetter) {
  constexpr size_t kMarks = 1'000'000;
  EXPECT_TRUE(
      to_nfc("a" + repeated(kMarks, "\u0301") + repeated(kMarks, "\u0316")) ==
      "\u00E1" + repeated(kMarks, "\u0316") + repeated(kMarks - 1, "\u0301"));
  EXPECT_TRUE(to_nfc(repeated(kMarks, "\u0F73")) ==
              repeated(kMarks, "\u0F71") + repeated(kMarks, "\u0F72"));
}

TEST(ByteAlphabet, EveryByteHasOneCharacter) {
  std::string all;
  for (int b = 0; b < 256; ++b) all.push_back(static_cast<char>(b));
  EXPECT_EQ(from_alphabet(to_alphabet(all)), all);
  EXPECT_EQ(to_alphabet(" a\n"), "ĠaĊ");
  EXPECT_EQ(from_alphabet("a b"), "");
}

TEST(Regex, FindsAllMatches) {
  EXPECT_EQ(split(R"(\d+|\s)", "12 a345"), (Texts{"12", " ", "[a]", "345"}));
  EXPECT_EQ(split("x*", "axxb"), (Texts{"[a]", "xx", "[b]"}));
  EXPECT_EQ(split("", "ab"), (Texts{"[ab]"}));
}

TEST(Regex, KnowsWhetherItMayMatchNothing) {
  for (const char* pattern : {"", "x*", "^", "(?=x)", "a|b?"})
    EXPECT_TRUE(Regex::compile(pattern)->may_match_nothing()) << pattern;
  for (const char* pattern : {"x", "x+", "(?<!a) ", "a|b"})
    EXPECT_FALSE(Regex::compile(pattern)->may_match_nothing()) << pattern;
}

TEST(Regex, WrongAndForeignPatternsAreRefused) {
  for (const char* pattern : {"(", "[a", "a{2,1}", "\\p{Nope}"})
    EXPECT_SAYS(Regex::compile(pattern), "at offset") << pattern;
  for (const char* pattern :
       {R"([\w&&[^a]])", R"(\h)", R"(a\Kb)", "[a[b]]", R"(\p{N}{1,3}+)",
        "a{,2}", "(?m:.)", "(?is)x", R"(\w+)", R"(\bx)", R"(\Qa)"})
    EXPECT_SAYS(Regex::compile(pattern), "not supported") << pattern;
  for (const char* pattern :
       {R"([\[\]&]&&\\h)", "[]a]", "[^]]", "a{2,}b{3}", "(?i:'s|'m)",
        "(?!m)(?:s)", "[{,2}+]", R"(\{,2})"})
    EXPECT_OK(Regex::compile(pattern)) << pattern;
}

TEST(Regex, AnExponentialPatternFails) {
  const Regex regex = Regex::compile("(a|a)*b|(aa|aaa|a)+c").value();
  Matcher matcher;
  EXPECT_FALSE(regex
                   .for_each_match(std::string(60, 'a'), matcher,
                                   [](size_t, size_t) { return ok_status(); })
                   .ok());
}

TEST(Regex, TheUsualPatterns) {
  const std::string text = "I'll  pay $12345 \n\n\tOK?\r\n naïve ";
  EXPECT_EQ(split(kGpt2Pattern, text),
            (Texts{"I", "'ll", " ", " pay", " $", "12345", " \n\n", "\t", "OK",
                   "?", "\r\n", " naïve", " "}));
  EXPECT_EQ(split(kLlama3Pattern, text),
            (Texts{"I", "'ll", " ", " pay", " $", "123", "45", " \n\n", "\tOK",
                   "?\r\n", " naïve", " "}));
}

// PCRE2 has no just-in-time compiler on some processors, and some kernels
// forbid it.
constexpr const char* kNoJit = "(*NO_JIT)";

TEST(Regex, WithoutTheJustInTimeCompilerTimeIsLinear) {
  constexpr size_t kWords = 2'000'000;
  const Regex regex =
      Regex::compile(std::string(kNoJit) + R"(\p{L}+|\s)").value();
  Matcher matcher;
  size_t matches = 0;
  const Status s = regex.for_each_match(repeated(kWords, "a "), matcher,
                                        [&](size_t, size_t) {
                                          ++matches;
                                          return ok_status();
                                        });
  EXPECT_OK(s);
  EXPECT_EQ(matches, 2 * kWords);
}

TEST(Regex, BytesThatAreNotUtf8AreKeptApart) {
  const std::string text =
      "ab\xFF\xFE"
      "cd";
  EXPECT_EQ(split(R"(\p{L}+)", text), (Texts{"ab", "[\xFF\xFE]", "cd"}));
  for (const char* compiler : {"", kNoJit})
    EXPECT_EQ(split(compiler + std::string(R"([^x]+|b(?!c))"), text),
              (Texts{"ab", "[\xFF\xFE]", "cd"}));
  EXPECT_EQ(split(Regex::compile_for_bytes(R"([\xFE-\xFF])").value(), text),
            (Texts{"[ab]", "\xFF", "\xFE", "[cd]"}));
}

}  // namespace
}  // namespace remesh::tokenizer
