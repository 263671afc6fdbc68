// The output side of prepare.h: the shards of a split, and which text goes to
// which split. Not thread-safe; a BlockRouter has text encoded by threads of
// its own.
#pragma once

#include <cstdint>
#include <deque>
#include <future>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "proto/data/index.h"
#include "worker/data/chat_template.h"
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
  std::optional<ShardWriter> writer_;
};

// Distributes blocks over the two splits: every (1 / fraction)-th is held out.
//
// A document of text, as far as it is in one split, is encoded as a whole and
// followed by the token that ends a text. If it is longer than 4 MiB, parts end
// where the usual tokenizers never merge. A conversation is never divided, and
// its pieces are encoded one by one, as they are when a model is asked.
//
// Text is encoded by as many threads as there are cores, about a MiB or one
// part each, and written in its order, so that the shards do not depend on
// them.
class BlockRouter {
 public:
  BlockRouter(double fraction, uint64_t seed, int64_t block_bytes,
              const tokenizer::Tokenizer& tokenizer, SplitWriter& train,
              SplitWriter& val);

  Status add(const TextBlock& block);
  Status add(const Conversation& conversation);
  // Writes what is being encoded. Call it after the last add().
  Status finish();
  int64_t conversations() const { return conversations_; }
  // Tokens of answers in them.
  int64_t answer_tokens() const { return answer_tokens_; }

 private:
  // Text of a document, of which it may be the end.
  struct Part {
    SplitWriter* to;
    std::string text;
    bool continues, ends;
  };
  using Encoded =
      std::vector<std::pair<SplitWriter*, std::vector<int32_t>>>;  // by part

  SplitWriter* next_block();
  Status append(SplitWriter* to, std::string_view text);
  Status add_part(size_t bytes, bool ends);
  void start_encoding();
  Status write_encoded();
  Result<Encoded> encode(const std::vector<Part>& parts) const;
  Status close();

  double fraction_;
  double phase_;
  int64_t block_bytes_;
  const tokenizer::Tokenizer& tokenizer_;
  SplitWriter& train_;
  SplitWriter& val_;
  SplitWriter* open_ = nullptr;  // the split of a document without an end yet
  std::string text_;             // of that document, not yet a part
  bool continues_ = false;       // parts of that document have been taken
  std::vector<Part> parts_;      // to be encoded
  size_t parts_bytes_ = 0;
  size_t threads_;
  std::deque<std::future<Result<Encoded>>> encoding_;  // the oldest first
  int64_t blocks_ = 0;
  SplitWriter* conversations_to_ = nullptr;  // the split of this block
  int64_t conversation_bytes_ = 0;           // in it
  int64_t conversations_ = 0;
  int64_t answer_tokens_ = 0;
  std::vector<int32_t> tokens_;
};

}  // namespace remesh::data
