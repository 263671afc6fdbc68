// Dataset: the token shards that `remesh data prepare` wrote, memory-mapped.
//
// A data set is a folder: dataset.json (the index, written last: a folder
// without it is no data set), train-00000.tok ... and val-00000.tok ...
// (shard.h has the file form). A split is one long sequence of tokens; where
// one shard ends and the next begins does not show.
//
// Ownership: a Dataset owns its mappings and can be moved; the Splits inside
// live as long as it does. Threads: immutable after open(), so any number may
// read. Nothing is written, ever.
//
// What is checked when: open() checks the index, that every shard has the
// size, header checksum, tokenizer, vocabulary and checksum that the index
// says. read() checks each token it copies against the vocabulary. verify()
// reads everything and compares the checksums.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::data {

class MappedShard;

// One split: tokens 0 .. num_tokens() - 1.
class Split {
 public:
  Split();
  ~Split();
  Split(Split&&) noexcept;
  Split& operator=(Split&&) noexcept;

  int64_t num_tokens() const { return num_tokens_; }
  // Copies tokens [begin, begin + out.size()). Fails when the range is not
  // inside the split (out of range) or a token is not in the vocabulary
  // (corrupt, with shard and index).
  Status read(int64_t begin, std::span<int32_t> out) const;
  // Window w of `seq_len` tokens (sampler.h): input tokens
  // [w * seq_len, (w + 1) * seq_len) and, as targets, the same one later.
  // REQUIRES: both spans have seq_len elements.
  Status read_window(int64_t window, int64_t seq_len, std::span<int32_t> input,
                     std::span<int32_t> target) const;

 private:
  friend class Dataset;
  std::vector<MappedShard> shards_;
  std::vector<int64_t> begins_;  // first token of each shard
  int64_t num_tokens_ = 0;
  int64_t vocab_size_ = 0;
};

class Dataset {
 public:
  static Result<Dataset> open(const std::string& dir);

  const Split& train() const { return train_; }
  const Split& val() const { return val_; }  // may have no tokens
  int64_t vocab_size() const { return vocab_size_; }
  int32_t end_of_text() const { return end_of_text_; }
  // Identity of the tokens, 32 hex digits: a hash over the shards' checksums,
  // the same wherever the data set was made from the same text and options.
  const std::string& data_id() const { return data_id_; }
  const std::string& dir() const { return dir_; }

  // Reads every token: checksums and range. `progress` (may be empty) is
  // called now and then with bytes done and in all.
  Status verify(
      const std::function<void(uint64_t, uint64_t)>& progress = {}) const;

 private:
  Dataset() = default;
  std::string dir_;
  std::string data_id_;
  int64_t vocab_size_ = 0;
  int32_t end_of_text_ = 0;
  Split train_;
  Split val_;
};

}  // namespace remesh::data
