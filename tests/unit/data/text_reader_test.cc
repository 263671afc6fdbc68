#include "worker/data/text_reader.h"

#include <sys/stat.h>

#include <random>

#include "tests/testing/expect.h"
#include "tests/testing/seed.h"
#include "tests/unit/data/data_test_util.h"
#include "worker/tokenizer/unicode.h"

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

TEST(SplitText, ACharacterMayBeDividedBetweenPortions) {
  const TempDir dir;
  std::string all;
  const auto split = [&](const std::string& text) -> Result<uint64_t> {
    all.clear();
    ASSIGN_OR_RETURN(TextReader reader,
                     TextReader::open(dir.write("a.txt", text)));
    BlockSplitter splitter(64, [&](const TextBlock& b) {
      all += b.text;
      return ok_status();
    });
    ASSIGN_OR_RETURN(
        const uint64_t bytes,
        split_text(reader, /*raw_bytes=*/false, splitter, [](uint64_t) {}));
    RETURN_IF_ERROR(splitter.finish());
    return bytes;
  };
  // It reads a MiB at once.
  for (const size_t before : {(1 << 20) - 4, (1 << 20) - 3, (1 << 20) - 1}) {
    const std::string text = std::string(before, 'a') + "\xF0\x9D\x84\x9E";
    EXPECT_EQ(split(text + "b\n").value(), text.size() + 2);
    EXPECT_EQ(all, text + "b\n");
    const std::string where = "not UTF-8 at byte " + std::to_string(before);
    EXPECT_SAYS(split(text.substr(0, before + 2) + "b\n"), where);
    EXPECT_SAYS(split(text.substr(0, before + 3)), where);
  }
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
      ASSERT_EQ(tokenizer::valid_prefix(b.text), b.text.size());
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
