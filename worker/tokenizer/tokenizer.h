// Tokenizer: converts text to token ids and back.
//
// A tokenizer is immutable, so any number of threads may use one. Token ids are
// 0 .. vocab_size() - 1. Every token shard has the id() of its tokenizer.
//
// Text is a sequence of bytes, usually UTF-8. For the tokenizers that can
// represent every byte (bytes, byte-level BPE, and BPE with byte fallback),
// decode(encode(x)) == x for any bytes x, except that a tokenizer may change x
// first (changes()). No token joins bytes that are not UTF-8 to characters
// beside them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"

namespace remesh::tokenizer {

struct EncodeOptions {
  // Whether a special token that is written out in the text, such as
  // "<|endoftext|>", becomes that token. False for text from outside.
  bool special = false;
  // The text continues a document, so that no space is added before it.
  bool continues = false;
  // What it continues ends with a token after which a text begins again
  // (restarts_after()), so that some tokenizers add a space.
  bool after_added = false;
  // More of the document follows, so that the text does not end there.
  bool continued = false;
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Stable identity, at most 63 bytes: "bytes", or the format and the XXH3-128
  // of the file, as `xxhsum -H2` prints it.
  virtual std::string id() const = 0;
  virtual int64_t vocab_size() const = 0;
  // The token that ends a document.
  virtual int32_t end_of_text() const = 0;
  // Appends the tokens of `text` to `out`. Never adds end_of_text() or a token
  // that begins a document. Fails if the vocabulary cannot represent the text.
  virtual Status encode(std::string_view text, const EncodeOptions& options,
                        std::vector<int32_t>& out) const = 0;
  // The bytes that the token stands for; part of a character, perhaps. Fails on
  // a token outside the vocabulary.
  virtual Result<std::string_view> token_bytes(int32_t token) const = 0;
  // Whether encode() begins a document with a space that decode() removes.
  virtual bool adds_space() const { return false; }
  // Whether a token is found in a text by itself, before the text is divided.
  virtual bool is_added(int32_t /*token*/) const { return false; }
  // Whether what follows such a token is encoded like a text of its own.
  virtual bool restarts_after(int32_t /*token*/) const { return false; }
  // What decode() cannot undo of encode(), as the file of the tokenizer names
  // it: "Lowercase, Strip"; "" if nothing. Not NFC and NFD, which leave a text
  // the same to its readers.
  virtual std::string changes() const { return ""; }

  // The text of `tokens`; end_of_text() becomes a line "<|endoftext|>". Fails
  // on a token outside the vocabulary.
  Result<std::string> decode(std::span<const int32_t> tokens) const;
};

// Decodes one token at a time. Not thread-safe; the tokenizer must outlive it.
class TextStream {
 public:
  // begins: the tokens begin a document, so that the space that a tokenizer
  // puts in front of it is left out.
  explicit TextStream(const Tokenizer& tokenizer, bool begins = true)
      : tokenizer_(tokenizer), document_begins_(begins) {}
  // Appends the characters that `token` completes to `out`. Bytes of a
  // character whose last bytes may still come are withheld.
  Status add(int32_t token, std::string& out);
  // Appends what is withheld, at the end of the tokens.
  void finish(std::string& out);

 private:
  const Tokenizer& tokenizer_;
  std::string withheld_;
  bool document_begins_;
  bool line_begins_ = true;
};

// One token per byte, 0..255, and 256 for end of text.
inline constexpr int32_t kByteEndOfText = 256;

// What open_tokenizer() accepts, for people.
inline constexpr char kTokenizerHelp[] =
    "bytes, a tokenizer.json or tokenizer.model (BPE), or a tiktoken file";

// Opens "bytes" or the file of a tokenizer: tokenizer_json.h, sentencepiece.h
// and tiktoken.h say what is supported. Of a tokenizer.json without a usual
// token that ends a document it is the eos_token of the tokenizer_config.json
// beside it. Fails on anything else, naming it and what is allowed.
Result<std::unique_ptr<Tokenizer>> open_tokenizer(const std::string& spec);

}  // namespace remesh::tokenizer
