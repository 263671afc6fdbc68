// The output side of prepare.h: the shards of a split, and which text goes to
// which split. Not thread-safe; a BlockRouter has text encoded by threads of
// its own.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "proto/data/index.h"
#include "worker/data/chat_template.h"
#include "worker/data/text_encoder.h"
#include "worker/data/text_reader.h"
#include "worker/data/token_shard.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::data {

// What a file's name ends with until it is complete.
inline constexpr char kPartial[] = ".partial";

// The shards of one split, under their temporary names.
class SplitWriter {
 public:
  SplitWriter(FileSystem& fs, std::string dir, std::string split,
              const tokenizer::Tokenizer& tokenizer, int64_t shard_tokens,
              bool marked)
      : fs_(fs),
        dir_(std::move(dir)),
        split_(std::move(split)),
        tokenizer_(tokenizer),
        shard_tokens_(shard_tokens),
        marked_(marked) {}
  // Removes files that were not renamed into place.
  ~SplitWriter();
  SplitWriter(const SplitWriter&) = delete;
  SplitWriter& operator=(const SplitWriter&) = delete;

  Status append(std::span<const int32_t> tokens, Marks marks = {});
  Status finish() { return writer_ ? end_shard() : ok_status(); }
  const std::vector<ShardEntry>& entries() const { return entries_; }
  int64_t largest_token() const { return largest_token_; }  // -1: no tokens
  Status rename();

 private:
  Status begin_shard();
  Status end_shard();

  FileSystem& fs_;
  std::string dir_;
  std::string split_;
  const tokenizer::Tokenizer& tokenizer_;
  int64_t shard_tokens_;
  bool marked_;
  std::vector<std::string> names_;
  std::vector<ShardEntry> entries_;
  int64_t largest_token_ = -1;
  std::optional<ShardWriter> writer_;
};

// Distributes blocks over the two splits: every (1 / fraction)-th is held out.
//
// A document of text, as far as it is in one split, is encoded by a TextEncoder
// and followed by the token that ends a text. A conversation is never divided,
// and its pieces are encoded one by one, as they are when a model is asked.
class BlockRouter {
 public:
  BlockRouter(double fraction, uint64_t seed, int64_t block_bytes,
              const tokenizer::Tokenizer& tokenizer, SplitWriter& train,
              SplitWriter& val);
  BlockRouter(const BlockRouter&) = delete;
  BlockRouter& operator=(const BlockRouter&) = delete;

  Status add(const TextBlock& block);
  Status add(const Conversation& conversation);
  // Writes what is being encoded. Call it after the last add().
  Status finish() { return encoder_.finish(); }
  int64_t conversations() const { return conversations_; }
  // Tokens of answers in them.
  int64_t answer_tokens() const { return answer_tokens_; }

 private:
  int next_block();  // its split: an index of splits_

  double fraction_;
  double phase_;
  int64_t block_bytes_;
  const tokenizer::Tokenizer& tokenizer_;
  std::array<SplitWriter*, 2> splits_;  // training, validation
  int last_ = 0;                        // the split of the last block of text
  TextEncoder encoder_;
  int64_t blocks_ = 0;
  SplitWriter* conversations_to_ = nullptr;  // the split of this block
  int64_t conversation_bytes_ = 0;           // in it
  int64_t conversations_ = 0;
  int64_t answer_tokens_ = 0;
  std::vector<int32_t> tokens_;
};

}  // namespace remesh::data
