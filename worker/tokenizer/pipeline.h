// The tokenizer that a file describes: added tokens are found, the text between
// them is normalized and divided into pieces, and each piece is encoded
// (huggingface/tokenizers, documentation of the components).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "worker/tokenizer/bpe.h"
#include "worker/tokenizer/regex.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::tokenizer {

// GPT-2's pattern, and that of Llama 3.
extern const char kGpt2Pattern[];
extern const char kLlama3Pattern[];

// The longest token of a file, as the file writes it; those of well-known
// models have up to 256 bytes. Merges are found by dividing tokens at every
// byte, and at each byte of a text added tokens are compared with it.
inline constexpr size_t kMaxTokenBytes = 1024;

// What stands for a space in SentencePiece's vocabularies.
inline constexpr char kSpaceMark[] = "\u2581";

// A token that is found in the text before anything else, by its text.
struct AddedToken {
  int32_t id = 0;
  bool special = false;     // only found if the caller asks for it
  bool strip_left = false;  // takes the white space before it
  bool strip_right = false;
};
using AddedTokens = std::map<std::string, AddedToken, std::less<>>;

struct Pipeline {
  // Where a space mark is added: before a document, or before every text
  // between added tokens. decode() removes that of a document.
  enum class Prefix { kNone, kDocument, kText };

  std::string id;
  int32_t end_of_text = 0;
  AddedTokens added;
  bool nfc = false;
  bool marks_spaces = false;  // each space becomes a mark
  // Of several spaces one is left, and none at the ends of a document.
  bool removes_spaces = false;
  // The texts of added tokens have marks; they are found where spaces are
  // marked. Otherwise they are found first. REQUIRES: not with Prefix::kText.
  bool added_have_marks = false;
  Prefix prefix = Prefix::kNone;
  // Each divides the pieces of the one before: a match is a piece, and so is
  // what is between two matches.
  std::vector<Regex> splits;
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

// REQUIRES: end_of_text and all ids are less than decoded.size(), and no added
// token is empty.
std::unique_ptr<Tokenizer> make_tokenizer(Pipeline pipeline);

}  // namespace remesh::tokenizer
