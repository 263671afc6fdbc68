// The tokenizer that a file describes: added tokens are found, the text between
// them is normalized and divided into pieces, and each piece is encoded
// (huggingface/tokenizers, documentation of the components).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "worker/tokenizer/added_tokens.h"
#include "worker/tokenizer/bpe.h"
#include "worker/tokenizer/regex.h"
#include "worker/tokenizer/text_step.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::tokenizer {

// GPT-2's pattern, and that of Llama 3.
extern const char kGpt2Pattern[];
extern const char kLlama3Pattern[];

// The longest token of a file, as the file writes it; those of well-known
// models have up to 256 bytes. Merges are found by dividing tokens at every
// byte, and at each byte of a text added tokens are compared with it.
inline constexpr size_t kMaxTokenBytes = 1024;

// A match is a piece, and so is what is between two matches.
struct Split {
  Regex regex;
  bool removes = false;  // the matches
};

struct Pipeline {
  std::string id;
  int32_t end_of_text = 0;
  AddedTokens added;  // found in a text as it is given
  // What is done to each text between those, which is a text of its own.
  std::vector<TextStep> normalizer;
  AddedTokens normalized_added;  // found in normalized text
  // What is done to each text between any added tokens.
  std::vector<TextStep> prefix;
  // Whether such a text begins like a document after any added token, too.
  bool restarts = false;
  bool adds_space = false;    // a step puts one before a document
  std::string changes;        // Tokenizer::changes()
  std::vector<Split> splits;  // each divides the pieces of the one before
  Bpe bpe;
  std::vector<std::string> decoded;  // the bytes of each token
};

// Where no merge has a mark but at its start, divides text before marks, so
// that the pieces are short.
Status divide_before_marks(const BpeModel& bpe, Pipeline* pipeline);

// The byte that a token named like "<0x0A>" stands for.
std::optional<char> byte_of(const std::string& token);
// The text with spaces for marks.
std::string unmark_spaces(std::string text);

// REQUIRES: end_of_text and all ids are less than decoded.size().
std::unique_ptr<Tokenizer> make_tokenizer(Pipeline pipeline);

}  // namespace remesh::tokenizer
