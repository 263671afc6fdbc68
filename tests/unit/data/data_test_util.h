// Texts, compression, the files of a folder, and data sets.
#pragma once

#include <archive.h>
#include <archive_entry.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "tests/testing/expect.h"
#include "tests/testing/temp_dir.h"
#include "worker/data/dataset.h"
#include "worker/data/prepare.h"

namespace remesh::data {

// About `bytes` of words, lines and documents.
inline std::string words(size_t bytes, uint64_t seed = 1) {
  std::mt19937_64 rng(seed);
  std::string text;
  while (text.size() < bytes) {
    text += "word" + std::to_string(rng() % 1000);
    text += rng() % 10 == 0 ? "\n" : " ";
    if (rng() % 200 == 0) text += "\n<|endoftext|>\n";
  }
  return text + "\n";
}

inline std::vector<int32_t> tokens_of(const Split& split) {
  std::vector<int32_t> tokens(static_cast<size_t>(split.num_tokens()));
  EXPECT_OK(split.read(0, tokens));
  return tokens;
}

// Makes the data set, or fails the test.
inline void make(const PrepareOptions& o) {
  ASSERT_OK(prepare(o, *posix_file_system()));
}

// `filter`: gzip, xz, zstd or bzip2.
inline std::string compressed(const std::string& text, const char* filter) {
  std::string out(2 * text.size() + 4096, '\0');
  size_t used = 0;
  archive* a = archive_write_new();
  archive_entry* entry = archive_entry_new();
  archive_entry_set_filetype(entry, AE_IFREG);
  EXPECT_EQ(archive_write_add_filter_by_name(a, filter), ARCHIVE_OK);
  EXPECT_EQ(archive_write_set_format_raw(a), ARCHIVE_OK);
  EXPECT_EQ(archive_write_set_bytes_in_last_block(a, 1), ARCHIVE_OK);
  EXPECT_EQ(archive_write_open_memory(a, out.data(), out.size(), &used),
            ARCHIVE_OK);
  EXPECT_EQ(archive_write_header(a, entry), ARCHIVE_OK);
  EXPECT_EQ(archive_write_data(a, text.data(), text.size()),
            static_cast<la_ssize_t>(text.size()));
  EXPECT_EQ(archive_write_close(a), ARCHIVE_OK);
  archive_entry_free(entry);
  archive_write_free(a);
  out.resize(used);
  return out;
}
inline std::string xz(const std::string& text) {
  return compressed(text, "xz");
}

// Names in a folder, sorted.
inline std::vector<std::string> names_in(const std::string& dir) {
  std::vector<std::string> names;
  for (const auto& e : std::filesystem::directory_iterator(dir))
    names.push_back(e.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace remesh::data
