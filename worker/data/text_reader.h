// TextReader: the bytes of a text file, plain or .xz, in portions.
// Utf8Check: whether a stream of bytes is UTF-8. BlockCutter: a stream of text
// cut into documents and blocks. Together the input side of prepare.h.
//
// None is thread-safe; each uses memory bounded by constants and block size
// (xz: by the dictionary, at most 1 GiB, usually 8 MiB).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"
#include "worker/data/file.h"
#include "worker/data/token_shard.h"

namespace remesh::data {

class TextReader {
 public:
  // A file that begins as .xz does is decompressed; one named .xz that does
  // not is refused.
  static Result<TextReader> open(const std::string& path);
  TextReader(TextReader&&) noexcept;
  TextReader& operator=(TextReader&&) noexcept;
  ~TextReader();

  // Up to out.size() bytes of text; 0 at the end. Fails (corrupt) on a
  // truncated or damaged .xz.
  Result<size_t> read(std::span<char> out);

  bool compressed() const;
  const std::string& path() const;
  uint64_t file_bytes() const;    // size of the file as stored
  uint64_t bytes_done() const;    // of these, read so far
  std::string file_hash() const;  // XXH3-128 of the bytes read so far

 private:
  struct Impl;
  explicit TextReader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Unicode 15, table 3-7: no overlong forms, surrogates, or code points above
// U+10FFFF.
class Utf8Check {
 public:
  // False when `bytes`, after those before, cannot be UTF-8; then
  // bad_offset() is where the wrong character begins, in the whole stream.
  bool feed(std::string_view bytes);
  // False when the stream ends inside a character.
  bool finish();
  uint64_t bad_offset() const { return char_offset_; }

 private:
  uint64_t offset_ = 0;       // bytes seen
  uint64_t char_offset_ = 0;  // where the open character began
  int missing_ = 0;           // continuation bytes it still needs
  unsigned char low_ = 0x80;  // bounds of the next one
  unsigned char high_ = 0xBF;
};

inline constexpr std::string_view kDocumentSeparator = "<|endoftext|>";

// A block of text. Documents end after text[0, ends[k]) for each k; an end of
// 0 ends the document that the block before left open. The text after the
// last end belongs to a document that goes on in the next block.
struct TextBlock {
  std::string text;
  std::vector<size_t> ends;
};

// Where blocks and documents end depends on the text alone, not on the
// portions it is fed in.
class BlockCutter {
 public:
  using Sink = std::function<Status(const TextBlock&)>;
  // REQUIRES: block_bytes >= 64. No block is longer than twice that.
  BlockCutter(size_t block_bytes, Sink sink);

  Status feed(std::string_view text);
  Status end_file();  // ends the document, too
  Status finish();    // after the last end_file()
  int64_t documents() const { return documents_; }

 private:
  Status end_line();
  Status end_document();
  Status emit();
  Status cut_long_line();

  size_t block_bytes_;
  Sink sink_;
  TextBlock block_;
  size_t line_begin_ = 0;  // where the current line begins in block_.text
  bool line_cut_ = false;  // its beginning is in a block gone before
  bool document_open_ = false;
  int64_t documents_ = 0;
};

}  // namespace remesh::data
