// Bpe: byte-pair encoding of one piece of text (Sennrich et al., Neural Machine
// Translation of Rare Words with Subword Units, 2016).
//
// A piece begins as its bytes or characters; then, as long as there is one, the
// adjacent pair of lowest rank is merged, the leftmost of several. A heap of
// pairs makes that O(n log n). Most pieces of a usual text have been seen
// shortly before, and are found in a cache.
//
// Immutable after it is built; encode() may be called by any number of threads,
// each with a Scratch of its own.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "proto/base/status.h"

namespace remesh::tokenizer {

struct BpeModel {
  struct Merge {
    int32_t left = 0;
    int32_t right = 0;
    int32_t result = 0;
    // Of pairs of equal rank, which have the same result, the leftmost merges
    // first.
    uint32_t rank = 0;
  };
  std::vector<std::string> tokens;  // by id; empty: no such token
  std::vector<Merge> merges;
  // A piece begins as bytes, which have tokens of one byte; otherwise as
  // characters.
  bool byte_level = false;
  // Characters without a token become the tokens <0x00> to <0xFF> of their
  // bytes.
  bool byte_fallback = true;
  // What stands for any other character or byte without a token; -1: there must
  // be none. With fuse_unknown one stands for all that follow each other.
  int32_t unknown = -1;
  bool fuse_unknown = false;
  // A piece that is a token becomes it, even if no merges lead there.
  bool ignore_merges = false;
};

class Bpe {
 public:
  Bpe() = default;  // without tokens

  // Memory that calls of encode() of one Bpe reuse.
  struct Scratch {
    // The cache has a place for every 8 bytes of a text of that size, up to a
    // limit.
    explicit Scratch(size_t text_bytes);

    struct Encoded {
      std::string piece;
      std::vector<int32_t> ids;
    };
    std::vector<Encoded> cache;  // by hash; a power of two
    std::vector<int32_t> ids;
    std::vector<int32_t> previous;
    std::vector<int32_t> next;
    std::vector<uint64_t> heap;
  };

  // Fails, naming them, if ids of merges are outside the tokens, if two tokens
  // are equal, or if there are no tokens.
  static Result<Bpe> make(BpeModel model);

  // Appends the tokens of the piece. Fails if a byte or character has none and
  // no token is for unknown ones.
  // REQUIRES: less than 2^31 bytes.
  Status encode(std::string_view piece, Scratch& scratch,
                std::vector<int32_t>& out) const;

 private:
  struct Slot {
    uint64_t pair = UINT64_MAX;
    uint32_t rank = UINT32_MAX;
    int32_t result = -1;
  };
  struct Hash {
    using is_transparent = void;  // NOLINT(readability-identifier-naming)
    size_t operator()(std::string_view text) const;
  };

  explicit Bpe(BpeModel model) : model_(std::move(model)) {}
  Status index_tokens();
  Status index_merges();
  int32_t find(std::string_view token) const;
  // The slot of a pair, or a free one.
  size_t slot_of(uint64_t pair) const;
  const Slot& merge_of(int32_t left, int32_t right) const;
  Status start(std::string_view piece, std::vector<int32_t>& ids) const;
  void merge(Scratch& scratch) const;

  BpeModel model_;
  std::unordered_map<std::string, int32_t, Hash, std::equal_to<>> vocabulary_;
  std::vector<Slot> merges_;  // by pair; a power of two, at most half full
  std::array<int32_t, 256> bytes_{};
};

}  // namespace remesh::tokenizer
