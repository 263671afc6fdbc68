// Dataset: memory-mapped token shards written by `remesh data prepare`.
//
// A data set is a folder with dataset.json (the index, written last: without it
// the folder is not a data set), train-00000.tok ... and val-00000.tok ...
// (token_shard.h describes the format). A split is one long sequence of tokens;
// shard boundaries are invisible.
//
// A mixture (`remesh data mix`) is a folder with a dataset.json that names
// other data sets, its members. Each keeps its own splits.
//
// Ownership: a Dataset owns its mappings and can be moved; its Splits live as
// long as it does. Threads: immutable after open(), so any number of threads
// may read. It never writes.
//
// Checks: open() checks the index, and that the size, header checksum,
// tokenizer, vocabulary and checksum of every shard match it. read() checks
// each token that it copies against the vocabulary. verify() reads all tokens
// and compares the checksums.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "proto/data/index.h"
#include "worker/data/token_shard.h"

namespace remesh::data {

// One split: tokens 0 .. num_tokens() - 1.
class Split {
 public:
  // Maps the shards, which Dataset::open() describes; called once.
  Status open(const std::string& dir, const Index& index,
              const std::vector<ShardEntry>& entries);

  int64_t num_tokens() const { return num_tokens_; }
  // Copies tokens [begin, begin + out.size()). Fails with InvalidArgument if
  // the range is not inside the split, and with Corrupt, naming shard and
  // index, if a token is not in the vocabulary.
  Status read(int64_t begin, std::span<int32_t> out) const;
  // Window w of `seq_len` tokens (sampler.h): input tokens
  // [w * seq_len, (w + 1) * seq_len); the targets are the same range shifted by
  // one, and -1 where the loss does not count them. `starts`: the positions in
  // the window, but not 0, of tokens that begin a document.
  // REQUIRES: both spans have seq_len elements.
  Status read_window(int64_t window, int64_t seq_len, std::span<int32_t> input,
                     std::span<int32_t> target,
                     std::vector<int64_t>* starts) const;
  // Whether a document begins with that token. Fails like read().
  Result<bool> begins_document(int64_t token) const;

 private:
  friend class Dataset;
  // f(shard, first token in it, tokens) for each part of the range.
  template <typename F>
  Status for_each_part(int64_t begin, int64_t count, const F& f) const;

  std::vector<MappedShard> shards_;
  std::vector<int64_t> begins_;  // first token of each shard
  int64_t num_tokens_ = 0;
  int64_t vocab_size_ = 0;
  int32_t end_of_text_ = 0;
  bool marked_ = false;
};

// A data set, or a member of a mixture.
struct Member {
  std::string name;
  double weight = 1;
  Split train, val;  // val may have no tokens
};

class Dataset {
 public:
  static Result<Dataset> open(const std::string& dir);

  // At least one; those of a mixture, or the data set itself.
  const std::vector<Member>& members() const { return members_; }
  bool is_mixture() const { return is_mixture_; }
  // The splits of the first member.
  const Split& train() const { return members_.front().train; }
  const Split& val() const { return members_.front().val; }
  int64_t vocab_size() const { return vocab_size_; }
  // Every token is below it; at most vocab_size().
  int64_t token_limit() const { return token_limit_; }
  int32_t end_of_text() const { return end_of_text_; }
  // Identity of the tokens, 32 hex digits: a hash of the checksums of the
  // shards. The same text and options give the same id.
  const std::string& data_id() const { return data_id_; }
  const std::string& dir() const { return dir_; }
  // The id of the tokenizer.
  const std::string& tokenizer() const { return tokenizer_; }

  // Reads every token and checks checksums and vocabulary. Calls `progress`
  // (may be empty) after each shard with the bytes done and in total.
  Status verify(
      const std::function<void(uint64_t, uint64_t)>& progress = {}) const;

 private:
  Dataset() = default;
  std::string dir_;
  std::string data_id_;
  std::string tokenizer_;
  int64_t vocab_size_ = 0;
  int64_t token_limit_ = 0;
  int32_t end_of_text_ = 0;
  bool is_mixture_ = false;
  std::vector<Member> members_;
};

}  // namespace remesh::data
