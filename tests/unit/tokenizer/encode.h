// Tokens of a text, which the tokenizer must be able to encode.
#pragma once

#include <string>
#include <vector>

#include "tests/testing/expect.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::tokenizer {

using Tokens = std::vector<int32_t>;

inline Tokens encode(const Tokenizer& t, const std::string& text,
                     const EncodeOptions& options = {}) {
  Tokens tokens;
  EXPECT_OK(t.encode(text, options, tokens));
  return tokens;
}

}  // namespace remesh::tokenizer
