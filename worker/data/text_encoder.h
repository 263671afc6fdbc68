// TextEncoder: encodes documents whose text streams in, and passes their tokens
// on in the order of the text.
//
// A document is encoded as a whole. If it is longer than 4 MiB, parts end where
// the usual tokenizers never merge. As many threads as there are cores encode
// about a MiB or one part each; the tokens do not depend on them. Each core
// takes up to 40 MiB of memory.
//
// One thread uses a TextEncoder, and it calls the sink in that thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "proto/base/status.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::data {

class TextEncoder {
 public:
  // `to`: what add() was given with the text.
  using Sink = std::function<Status(int to, std::span<const int32_t> tokens)>;
  struct Options {
    bool special = false;  // as of EncodeOptions
    bool ends = false;     // the token that ends a text follows each document
  };

  // The tokenizer must outlive it.
  TextEncoder(const tokenizer::Tokenizer& tokenizer, const Options& options,
              Sink sink);

  // Text of the document, which may be empty. All fail as tokenizer and sink
  // do.
  Status add(std::string_view text, int to);
  // Ends the document, if there is text of it.
  Status end();
  // Ends the last document and waits for all tokens.
  Status finish();

 private:
  struct Part {
    std::string text;
    int to;
    bool begins, ends;  // the document
  };
  using Encoded = std::vector<std::pair<int, std::vector<int32_t>>>;  // by part

  Status take_part(size_t bytes, bool ends);
  void start_encoding();
  Status pass_on();
  Result<Encoded> encode(const std::vector<Part>& parts) const;

  const tokenizer::Tokenizer& tokenizer_;
  Options options_;
  Sink sink_;
  std::string text_;  // of the document, not yet a part
  int to_ = 0;
  bool open_ = false;        // a document has begun
  bool begins_ = true;       // no part of it has been taken
  std::vector<Part> parts_;  // to be encoded
  size_t parts_bytes_ = 0;
  size_t threads_;
  std::deque<std::future<Result<Encoded>>> encoding_;  // the oldest first
};

}  // namespace remesh::data
