// BpeTrainer: makes the vocabulary of a byte-level BPE from text.
//
// The text is divided into pieces as Llama 3 does; pieces of equal bytes are
// counted once. Then the pair of adjacent tokens that is most frequent, and of
// several the one with the lowest ids, is merged, until the vocabulary is full
// or no pair occurs twice. Pairs, and the pieces that have them, are kept up to
// date, so that a merge costs what it changes. The result depends only on the
// text.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "proto/base/status.h"
#include "worker/tokenizer/regex.h"

namespace remesh::tokenizer {

class BpeTrainer {
 public:
  // The vocabulary has the 256 bytes, the merged tokens and <|endoftext|>.
  // Fails unless vocab_size is from 257 to 2^20.
  static Result<BpeTrainer> make(int64_t vocab_size);

  // Counts the pieces of a text that is not divided within a line.
  Status add(std::string_view text);
  // The tokenizer.json. Fails if the text has too few different pairs, saying
  // how large the vocabulary can be. `tick`: tokens so far, and in all.
  using Tick = std::function<void(uint64_t done, uint64_t total)>;
  Result<std::string> finish(const Tick& tick = {}) const;

 private:
  BpeTrainer(int64_t vocab_size, Regex pattern)
      : vocab_size_(vocab_size), pattern_(std::move(pattern)) {}
  int64_t vocab_size_;
  Regex pattern_;
  std::unordered_map<std::string, int64_t> counts_;
};

}  // namespace remesh::tokenizer
