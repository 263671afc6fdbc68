#include "worker/data/text_reader.h"

#include <sys/stat.h>

#include <random>

#include "tests/testing/expect.h"
#include "tests/testing/seed.h"
#include "tests/unit/data/data_test_util.h"

namespace remesh::data {
namespace {

std::string read_text(const std::string& path, size_t portion, Status* why) {
  auto reader = TextReader::open(path);
  *why = reader.status();
  std::string text;
  if (!reader.ok()) return text;
  std::vector<char> buffer(portion);
  for (;;) {
    const auto got = reader->read(buffer);
    *why = got.status();
    if (!got.ok() || *got == 0) return text;
    text.append(buffer.data(), *got);
  }
}

std::string random_bytes(size_t size, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::string text(size, ' ');
  for (char& c : text) c = static_cast<char>('a' + rng() % 20);
  return text;
}

TEST(TextReader, PlainAndXzGiveTheSameTextInAnyPortions) {
  const TempDir dir;
  for (const size_t size : {1, 3, 6, 7, 1000, 700'000}) {
    const std::string text = random_bytes(size, size);
    dir.write("a.txt", text);
    dir.write("a.xz", xz(text));
    dir.write("two.xz", xz(text) + xz(text));  // concatenated streams
    for (const size_t portion : {1, 7, 4096, 1 << 20}) {
      if (size * 10 / portion > 100'000) continue;
      Status why;
      EXPECT_EQ(read_text(dir / "a.txt", portion, &why), text);
      EXPECT_OK(why);
      EXPECT_EQ(read_text(dir / "a.xz", portion, &why), text);
      EXPECT_OK(why);
      EXPECT_EQ(read_text(dir / "two.xz", portion, &why), text + text);
    }
  }
}

TEST(TextReader, AByteOrderMarkAtTheBeginningIsNoText) {
  const TempDir dir;
  const std::string mark = "\uFEFF";
  for (const std::string& text :
       {std::string(), std::string("a"), std::string("\xEF\xBB"),
        "text " + mark, mark, mark.substr(0, 2) + "a"})
    for (const size_t portion : {1, 2, 4096}) {
      Status why;
      for (const char* filter : {"", "gzip", "xz"}) {
        const std::string whole = mark + text;
        const std::string path =
            dir.write("a", *filter == 0 ? whole : compressed(whole, filter));
        EXPECT_EQ(read_text(path, portion, &why), text) << filter;
        EXPECT_OK(why);
      }
    }
  ASSERT_OK_AND(auto raw, TextReader::open(dir.write("a", mark), true));
  std::vector<char> bytes(8);
  EXPECT_EQ(raw.read(bytes).value(), mark.size());
}

TEST(TextReader, AnEmptyTextMayBeCompressed) {
  TempDir dir;
  // gzip -c /dev/null
  const std::string gz("\x1f\x8b\x08\0\0\0\0\0\0\x03\x03\0\0\0\0\0\0\0\0\0",
                       20);
  for (const std::string& bytes : {gz, xz("")}) {
    Status why;
    EXPECT_EQ(read_text(dir.write("empty.gz", bytes), 8, &why), "");
    EXPECT_OK(why);
  }
  for (const size_t size : {10, 15, 19}) {
    Status why;
    (void)read_text(dir.write("cut.gz", gz.substr(0, size)), 8, &why);
    EXPECT_FALSE(why.ok()) << size;
  }
}

TEST(TextReader, ATruncatedOrDamagedXzIsAnError) {
  const TempDir dir;
  const std::string good = xz(random_bytes(100'000, 1));
  Status why;
  read_text(dir.write("cut.xz", good.substr(0, good.size() / 2)), 4096, &why);
  EXPECT_EQ(why.code(), Code::kCorrupt);
  std::string bad = good;
  bad[bad.size() / 2] = static_cast<char>(bad[bad.size() / 2] ^ 1);
  read_text(dir.write("bad.xz", bad), 4096, &why);
  EXPECT_EQ(why.code(), Code::kCorrupt);
  read_text(dir.write("tail.xz", good + "tail"), 4096, &why);
  EXPECT_EQ(why.code(), Code::kCorrupt);
  read_text(dir.write("not.xz", "plain text"), 4096, &why);
  EXPECT_EQ(
      why.message(),
      dir / "not.xz" + std::string(": named .xz, but not in that format"));
  read_text(dir / "none.txt", 4096, &why);
  EXPECT_EQ(why.code(), Code::kNotFound);
  ASSERT_EQ(mkfifo((dir / "pipe").c_str(), 0600), 0);
  for (const char* name : {".", "pipe"}) {
    read_text(dir / name, 4096, &why);
    EXPECT_SAYS(why, "not a regular file");
  }
}

// libarchive would take most of these for the text, or its first part.
TEST(TextReader, EveryDamageToGzipIsFound) {
  const TempDir dir;
  const std::string text = random_bytes(5'000, 2);
  const std::string one = compressed(text, "gzip"), two = one + one;
  Status why;
  EXPECT_EQ(read_text(dir.write("two.gz", two), 4096, &why), text + text);
  EXPECT_OK(why);
  EXPECT_EQ(
      read_text(dir.write("pad.gz", one + std::string(512, '\0')), 1000, &why),
      text);
  EXPECT_OK(why);
  std::mt19937_64 rng(3);
  const auto expect_found = [&](const std::string& bytes) {
    read_text(dir.write("bad.gz", bytes), 4096, &why);
    EXPECT_EQ(why.code(), Code::kCorrupt) << why.to_string();
  };
  for (int i = 0; i < 60; ++i) {  // behind the time, flags and name
    std::string bad = one;
    bad[10 + rng() % (bad.size() - 10)] ^= static_cast<char>(1 << rng() % 8);
    expect_found(bad);
  }
  for (const size_t cut : {one.size() - 1, one.size() + 6, two.size() - 1})
    expect_found(two.substr(0, cut));
  std::string second = two;
  second[one.size()] ^= 1;
  expect_found(second);
  expect_found(one + "tail");
}

TEST(TextReader, WhatFollowsTheEndOfAStreamIsFound) {
  const TempDir dir;
  const std::string text = random_bytes(5'000, 4);
  for (const char* filter : {"bzip2", "xz", "zstd"}) {
    const std::string one = compressed(text, filter);
    Status why;
    EXPECT_EQ(read_text(dir.write("two", one + one), 4096, &why), text + text)
        << filter;
    EXPECT_OK(why) << filter;
    std::string second = one + one;
    second[one.size()] ^= 1;
    for (const std::string& bad :
         {second, one + "tail", one + one.substr(0, 10)}) {
      read_text(dir.write("bad", bad), 4096, &why);
      EXPECT_EQ(why.code(), Code::kCorrupt) << filter << why.to_string();
    }
  }
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

TEST(Utf8, AgreesWithTheNaiveTwinOnRandomBytes) {
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
    Utf8Check check;
    const size_t cut = rng() % (s.size() + 1);
    const bool ok = check.feed(s.substr(0, cut)) && check.feed(s.substr(cut)) &&
                    check.finish();
    ASSERT_EQ(ok, naive_utf8(s)) << testing::PrintToString(s);
    valid += ok ? 1 : 0;
  }
  EXPECT_GT(valid, 1000);
}

TEST(Utf8, TheOffsetIsWhereTheWrongCharacterBegins) {
  Utf8Check a;
  EXPECT_FALSE(a.feed("ab\xC3\xA9\xE2\x82x"));
  EXPECT_EQ(a.bad_offset(), 4U);
  Utf8Check b;
  EXPECT_TRUE(b.feed("ab\xE2\x82"));
  EXPECT_FALSE(b.finish());
  EXPECT_EQ(b.bad_offset(), 2U);
}

// Text of short, long and empty lines, separators and near-separators.
std::string random_text(std::mt19937_64& rng) {
  static const char* const kLines[] = {"<|endoftext|>\n",
                                       "<|endoftext|>\r\n",
                                       "<|endoftext|> \n",
                                       " <|endoftext|>\n",
                                       "\n",
                                       "\r\n",
                                       "é€𝄞\n",
                                       "<|endoftext|>",
                                       "<|endoftext|>\n",
                                       "some words\n"};
  std::string text;
  for (size_t n = rng() % 30; n > 0; --n) {
    if (rng() % 3 != 0) {
      text += kLines[rng() % std::size(kLines)];
    } else {
      const uint64_t spaces = rng() % 2 == 0 ? 10 : 1000;
      for (size_t k = rng() % 300; k > 0; --k)
        text += rng() % 8 == 0 ? "€" : rng() % spaces == 0 ? " " : "x";
      if (rng() % 4 != 0) text += "\n";
    }
  }
  return text;
}

std::vector<std::string> naive_documents(const std::string& text) {
  std::vector<std::string> documents(1);
  for (size_t i = 0; i < text.size();) {
    const size_t end = std::min(text.find('\n', i), text.size() - 1) + 1;
    std::string line = text.substr(i, end - i);
    i = end;
    if (line == "<|endoftext|>\n" || line == "<|endoftext|>\r\n" ||
        line == "<|endoftext|>" || line == "<|endoftext|>\r")
      documents.emplace_back();
    else
      documents.back() += line;
  }
  std::erase(documents, "");
  return documents;
}

TEST(BlockSplitter, ASeparatorInsideADocumentIsItsText) {
  std::string all;
  BlockSplitter splitter(64, [&](const TextBlock& b) {
    all += b.text;
    return ok_status();
  });
  const std::string text = "a\n<|endoftext|>\nb\n<|endoftext|>";
  for (const bool separators : {false, true, false}) {
    ASSERT_OK(splitter.feed(text, separators));
    ASSERT_OK(splitter.end_file());
  }
  ASSERT_OK(splitter.finish());
  EXPECT_EQ(splitter.documents(), 1 + 2 + 1);
  EXPECT_EQ(all, text + "a\nb\n" + text);
}

TEST(BlockSplitter, DocumentsComeOutWholeWhateverThePortions) {
  const uint64_t seed = test_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 rng(seed);
  for (int trial = 0; trial < 1500; ++trial) {
    const std::string text = random_text(rng);
    const size_t block = 64 + rng() % 100;
    std::vector<TextBlock> blocks[2];
    for (const bool whole : {true, false}) {
      BlockSplitter splitter(block, [&](const TextBlock& b) {
        blocks[whole].push_back(b);
        return ok_status();
      });
      for (size_t i = 0; i < text.size();) {
        const size_t n = whole ? text.size() : 1 + rng() % 40;
        ASSERT_OK(splitter.feed(std::string_view(text).substr(i, n)));
        i += std::min(n, text.size() - i);
      }
      ASSERT_OK(splitter.end_file());
      ASSERT_OK(splitter.finish());
    }
    std::vector<std::string> documents(1);
    ASSERT_EQ(blocks[0].size(), blocks[1].size());
    for (size_t i = 0; i < blocks[0].size(); ++i) {
      const TextBlock& b = blocks[0][i];
      ASSERT_EQ(b.text, blocks[1][i].text);
      ASSERT_EQ(b.ends, blocks[1][i].ends);
      ASSERT_LE(b.text.size(), 2 * block);
      Utf8Check utf8;
      ASSERT_TRUE(utf8.feed(b.text) && utf8.finish());  // no split character
      size_t begin = 0;
      for (const size_t end : b.ends) {
        documents.back() += b.text.substr(begin, end - begin);
        documents.emplace_back();
        begin = end;
      }
      documents.back() += b.text.substr(begin);
    }
    ASSERT_EQ(documents.back(), "");
    documents.pop_back();
    ASSERT_EQ(documents, naive_documents(text));
  }
}

}  // namespace
}  // namespace remesh::data
