// tokenizer.json: the file format of huggingface/tokenizers, for models of type
// BPE.
//
//   normalizer      Sequence, NFC; and as Llama 2 has them, with U+2581 for
//                   spaces, Prepend and Replace
//   pre_tokenizer   Sequence, Metaspace, Split of a Regex or String (not one
//                   that removes its matches), Punctuation, ByteLevel without
//                   add_prefix_space, Digits
//   model           BPE with byte_fallback or ByteLevel; no dropout, prefix or
//                   suffix
//   post_processor  ignored: it only adds tokens around a text
//   decoder         Sequence, ByteLevel, Replace, ByteFallback, Fuse, Strip,
//                   Metaspace: what undoes the components above
//
// Any other kind is refused by name, and so is a token of over 1024 bytes
// (kMaxTokenBytes). A document ends with the first of these tokens that the
// file has: <|endoftext|>, <|end_of_text|>, </s>, <eos>, that of DeepSeek,
// <EOS_TOKEN>.
//
// Three departures from the library. Special tokens are found in the text
// before it is normalized, also if the file has them found after it. And
// Metaspace adds its mark before any document, as SentencePiece does; the
// library leaves it out before a space, which is lost when the tokens are
// decoded. A Split that removes what its pattern does not match keeps it; the
// patterns that have this, those of GPT-4 in Phi-4 and OLMo 2, match every
// character.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"
#include "worker/tokenizer/bpe.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::tokenizer {

// Fails, naming `name` and the component, on what is invalid or not supported.
Result<std::unique_ptr<Tokenizer>> parse_tokenizer_json(
    std::string_view text, const std::string& name);

// A tokenizer.json of byte-level BPE whose pieces are those of `pattern`. The
// token <|endoftext|> gets the last id.
std::string to_tokenizer_json(const std::vector<std::string>& tokens,
                              const std::vector<BpeModel::Merge>& merges,
                              const std::string& pattern);

}  // namespace remesh::tokenizer
