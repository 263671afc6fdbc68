// The input side of prepare.h. TextReader streams a text file, plain or
// compressed. BlockSplitter splits a stream into documents and blocks.
//
// None is thread-safe. Each uses constant memory, or memory proportional to the
// block size (and the dictionary of the compression, at most 1 GiB).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"
#include "worker/data/token_shard.h"

namespace remesh::data {

// A path without the end that names a compression: "a.txt" of "a.txt.gz".
std::string without_compression(const std::string& path);

class TextReader {
 public:
  // Decompresses gzip, xz, Zstandard and bzip2, which it recognises by their
  // first bytes. Fails on a file that is named so and is not, and on one that
  // is known to be no text, such as Parquet. `raw`: takes any file as it is.
  static Result<TextReader> open(const std::string& path, bool raw = false);
  TextReader(TextReader&&) noexcept;
  TextReader& operator=(TextReader&&) noexcept;
  ~TextReader();

  // Reads up to out.size() bytes of text; returns 0 at the end. A byte order
  // mark at its beginning is no part of it, unless `raw`. Corrupt on a
  // truncated or damaged compressed file.
  Result<size_t> read(std::span<char> out);

  bool compressed() const;
  const std::string& path() const;
  uint64_t file_bytes() const;    // size of the file as stored
  uint64_t bytes_done() const;    // of these, the bytes read so far
  std::string file_hash() const;  // XXH3-128 of the bytes read so far

 private:
  struct Impl;
  explicit TextReader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

inline constexpr std::string_view kDocumentSeparator = "<|endoftext|>";

// A block of text. Documents end after text[0, ends[k]) for each k. An end of 0
// ends the document that was still open after the previous block. The text
// after the last end belongs to a document that continues in the next block.
struct TextBlock {
  std::string text;
  std::vector<size_t> ends;
};

// Block and document boundaries depend only on the text, not on how it is
// divided into feed() calls.
class BlockSplitter {
 public:
  using Sink = std::function<Status(const TextBlock&)>;
  // REQUIRES: block_bytes >= 64. Blocks have at most twice as many bytes.
  BlockSplitter(size_t block_bytes, Sink sink);

  // separators: whether a line that is kDocumentSeparator ends a document.
  Status feed(std::string_view text, bool separators = true);
  Status end_file();  // also ends the document
  // After the last end_file().
  Status finish() { return emit(); }
  int64_t documents() const { return documents_; }

 private:
  Status end_line();
  Status end_document();
  Status emit();
  Status split_long_line();

  size_t block_bytes_;
  Sink sink_;
  TextBlock block_;
  size_t line_begin_ = 0;    // of the current line in block_.text
  bool line_split_ = false;  // its first part is in an earlier block
  bool separators_ = true;
  bool document_open_ = false;
  int64_t documents_ = 0;
};

// Reads a text to its end through the splitter and ends its document. Returns
// the size of the text. `progress` gets the bytes of the file that were read
// since it was called last. Fails, naming the file and the offset, on text that
// is not UTF-8, unless `raw_bytes`.
Result<uint64_t> split_text(TextReader& reader, bool raw_bytes,
                            BlockSplitter& splitter,
                            const std::function<void(uint64_t)>& progress);

}  // namespace remesh::data
