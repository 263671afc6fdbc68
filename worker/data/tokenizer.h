// Tokenizer: interface for converting text to token ids and back.
//
// A tokenizer is immutable, so any number of threads may use one. Token ids are
// 0 .. vocab_size() - 1. Every token shard has the id() of its tokenizer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"

namespace remesh::data {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Stable name, at most 63 bytes, e.g. "bytes".
  virtual std::string id() const = 0;
  virtual int64_t vocab_size() const = 0;
  // The token that ends a document.
  virtual int32_t end_of_text() const = 0;
  // Appends the tokens of `text` to `out`. Never adds end_of_text().
  virtual Status encode(std::string_view text,
                        std::vector<int32_t>& out) const = 0;
  // The text of `tokens`; end_of_text() becomes a line "<|endoftext|>". Fails
  // on a token outside the vocabulary.
  virtual Result<std::string> decode(std::span<const int32_t> tokens) const = 0;
};

// One token per byte, 0..255, and 256 for end of text.
inline constexpr int32_t kByteEndOfText = 256;

// The names that make_tokenizer() accepts.
std::vector<std::string> tokenizer_names();

// Fails on an unknown name, listing the known ones.
Result<std::unique_ptr<Tokenizer>> make_tokenizer(std::string_view name);

}  // namespace remesh::data
