// Tokens of a text, which the tokenizer must be able to encode.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "worker/tokenizer/tokenizer.h"

namespace remesh::tokenizer {

using Tokens = std::vector<int32_t>;

inline Tokens encode(const Tokenizer& t, const std::string& text,
                     const EncodeOptions& options = {}) {
  Tokens tokens;
  const Status status = t.encode(text, options, tokens);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return tokens;
}

}  // namespace remesh::tokenizer
