// The index of a data set, dataset.json: the shards and their inputs, in a
// format that people and scripts can read.
//
// A plain value; parsing and printing are pure, only read_index() and
// check_shard_files() read files.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"

namespace remesh::data {

inline constexpr char kIndexName[] = "dataset.json";
inline constexpr size_t kMostMembers = 16;  // of a mixture
// Inputs that dataset.json lists: the first ones. source_id covers all.
inline constexpr size_t kMostInputs = 10'000;
inline constexpr uint64_t kMaxIndexBytes = uint64_t{64} << 20;

struct ShardEntry {
  std::string file;  // name in the folder of the data set
  int64_t tokens = 0;
  std::string checksum;  // of the tokens, 32 hex digits
  friend bool operator==(const ShardEntry&, const ShardEntry&) = default;
};

struct InputEntry {
  std::string file;  // as given by the user
  uint64_t bytes = 0;
  std::string xxh128;  // of the file as stored, 32 hex digits
  friend bool operator==(const InputEntry&, const InputEntry&) = default;
};

// A data set that a mixture has.
struct MemberEntry {
  std::string name;   // for people
  std::string dir;    // absolute, or relative to the mixture's folder
  double weight = 1;  // 0: its text is for validation only
  std::string data_id;
  int64_t train_tokens = 0, val_tokens = 0;
  friend bool operator==(const MemberEntry&, const MemberEntry&) = default;
};

struct Index {
  std::string data_id;    // data_id_of() this index
  std::string source_id;  // hash of inputs and options; equal ids, equal data
  std::string tokenizer;
  int64_t vocab_size = 0;
  int32_t end_of_text = 0;
  int64_t largest_token = -1;  // that occurs; -1: the index does not say
  bool marked = false;         // the shards have marks (token_shard.h)
  int64_t documents = 0;
  uint64_t text_bytes = 0;
  std::vector<ShardEntry> train;
  std::vector<ShardEntry> val;
  std::vector<InputEntry> inputs;
  // A mixture has these instead of shards and inputs.
  std::vector<MemberEntry> members;
  friend bool operator==(const Index&, const Index&) = default;

  int64_t train_tokens() const;
  int64_t val_tokens() const;
  // Every token is below it.
  int64_t token_limit() const {
    return largest_token >= 0 ? largest_token + 1 : vocab_size;
  }
};

// The header of a shard file, and the bytes per token that follow it: 2 for a
// vocabulary of up to 65,536 entries, else 4.
inline constexpr uint64_t kShardHeaderBytes = 128;
uint32_t token_width(int64_t vocab_size);
// Bytes of the marks that may follow the tokens: two bits each.
constexpr uint64_t mark_bytes(int64_t tokens) {
  return 2 * ((static_cast<uint64_t>(tokens) + 7) / 8);
}

// The folder of a member of the mixture in `dir`.
std::string member_dir(const std::string& dir, const MemberEntry& member);
// The index of the data set in `dir`. NotFound if there is none, Corrupt if it
// is damaged or, with `member`, another one than that.
Result<Index> read_index(const std::string& dir,
                         const MemberEntry* member = nullptr);

// Compares the shard files in `dir`, or those of its members, with the index:
// their sizes and, if all have at most 256 MiB, their checksums. Fails with
// Corrupt, naming the file.
Status check_shard_files(const std::string& dir, const Index& index);

// A hash of tokenizer, vocabulary and the checksums of the shards, 32 hex
// digits.
std::string data_id_of(const Index& index);

std::string index_to_json(const Index& index);

// Fails with Corrupt, naming `name` and the key, unless the index is complete
// and consistent, including its data_id.
Result<Index> parse_index(std::string_view json, const std::string& name);

}  // namespace remesh::data
