// Token shards: the file format, its writer and its memory-mapped reader.
//
// A shard is a ShardHeader followed by num_tokens unsigned integers of
// token_width bytes. All numbers are little-endian, like all supported hosts
// (asserted). If the shard has marks, two arrays of one bit a token follow,
// token t's in byte t / 8 at position t % 8: whether the loss counts how well
// the token is predicted, and whether it begins a document. The checksum of the
// header covers the bytes before it, that of the tokens all bytes after the
// header. Both are from xxHash.
//
// A ShardWriter owns one file and belongs to one thread. A MappedShard is
// immutable. Truncating a mapped shard would raise SIGBUS in readers, so data
// sets are replaced by rename (prepare.h), never modified in place.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "proto/base/file_system.h"
#include "proto/base/mapped_file.h"
#include "proto/base/status.h"
#include "proto/base/xxh3.h"
#include "proto/data/index.h"

namespace remesh::data {

inline constexpr char kShardMagic[8] = {'R', 'M', 'S', 'H',
                                        'T', 'O', 'K', '\n'};
inline constexpr uint32_t kShardVersion = 1;

struct ShardHeader {
  char magic[8];             //  0: "RMSHTOK\n"
  uint32_t version;          //  8: 1
  uint32_t token_width;      // 12: bytes per token, 2 or 4
  uint64_t num_tokens;       // 16
  uint64_t vocab_size;       // 24: every token is less than this
  char tokenizer[64];        // 32: id, padded with at least one zero
  uint8_t checksum[16];      // 96: XXH3-128 of the tokens' bytes, big-endian
  uint32_t has_marks;        // 112: 0 or 1
  uint32_t reserved;         // 116: 0
  uint64_t header_checksum;  // 120: XXH3-64 of bytes 0 to 119
};
static_assert(sizeof(ShardHeader) == kShardHeaderBytes);
static_assert(std::is_trivially_copyable_v<ShardHeader>);
static_assert(std::endian::native == std::endian::little);

// The contents of a valid header.
struct ShardInfo {
  uint32_t token_width = 0;
  bool has_marks = false;
  int64_t num_tokens = 0;
  int64_t vocab_size = 0;
  std::string tokenizer;
  std::string checksum;  // of the tokens, 32 hex digits
};

// Checks magic number, version, checksum and ranges of the header of a file of
// `file_bytes`. Fails with Corrupt, naming `name`.
Result<ShardInfo> parse_shard_header(std::span<const std::byte> header,
                                     uint64_t file_bytes,
                                     const std::string& name);

// Marks of tokens that are appended together.
struct Marks {
  bool targets = true;           // the loss counts how well they are predicted
  bool begins_document = false;  // with the first one
};

// Writes one shard: append() any number of times, then finish().
class ShardWriter {
 public:
  // Creates the file. The vocabulary determines the token width.
  static Result<ShardWriter> create(FileSystem& fs, const std::string& path,
                                    const std::string& tokenizer,
                                    int64_t vocab_size, bool has_marks = false);
  // Without has_marks the marks are lost. REQUIRES: every token is in
  // [0, vocab_size).
  Status append(std::span<const int32_t> tokens, const Marks& marks = {});
  // Writes the buffered tokens and the header, and syncs.
  Result<ShardInfo> finish();
  int64_t num_tokens() const { return num_tokens_; }
  int64_t largest_token() const { return largest_token_; }  // -1: no tokens

 private:
  ShardWriter(std::unique_ptr<File> file, std::string tokenizer,
              int64_t vocab_size, bool has_marks);
  void mark(size_t tokens, const Marks& marks);
  Status flush();

  std::unique_ptr<File> file_;
  uint64_t written_ = sizeof(ShardHeader);  // end of what is in the file
  std::string tokenizer_;
  int64_t vocab_size_;
  uint32_t width_;
  bool has_marks_;
  int64_t num_tokens_ = 0;
  int64_t largest_token_ = -1;
  std::vector<std::byte> buffer_;
  std::vector<std::byte> targets_, begins_;  // marks
  Xxh3Stream hash_;
};

class MappedShard {
 public:
  // `limit`: every token is below it, and in the vocabulary.
  static Result<MappedShard> open(
      const std::string& path,
      int64_t limit = std::numeric_limits<int64_t>::max());

  const ShardInfo& info() const { return info_; }
  const std::string& path() const { return file_.path(); }
  // Copies tokens [begin, begin + out.size()). Corrupt if one is not below the
  // limit, Io if they cannot be read. REQUIRES: the range is inside the shard.
  Status read(int64_t begin, std::span<int32_t> out) const;
  // Reads the marks of these tokens, or fails with Io.
  Status load_marks(int64_t begin, int64_t count) const;
  // The marks of a token; without has_marks, of any. REQUIRES: it is inside the
  // shard.
  bool is_target(int64_t token) const {
    return !info_.has_marks || bit(0, token);
  }
  bool begins_document(int64_t token) const {
    return info_.has_marks && bit(1, token);
  }
  // Checks the tokens against the checksum and the limit.
  Status verify() const;
  uint64_t payload_bytes() const { return payload().size(); }

 private:
  MappedShard(MappedFile file, ShardInfo info, int64_t limit)
      : file_(std::move(file)),
        info_(std::move(info)),
        limit_(std::min(limit, info_.vocab_size)) {}
  std::span<const std::byte> payload() const {
    return file_.bytes().subspan(sizeof(ShardHeader));
  }
  std::span<const std::byte> marks(uint64_t array) const;
  bool bit(uint64_t array, int64_t token) const;

  MappedFile file_;
  ShardInfo info_;
  int64_t limit_;
};

}  // namespace remesh::data
