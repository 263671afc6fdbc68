// tokenizer.json: the file format of huggingface/tokenizers, for models of type
// BPE.
//
//   normalizer      Sequence, NFC, NFD, NFKC, NFKD, Lowercase, Strip, Replace
//                   of a Regex or String; and, together with Replace of spaces
//                   by U+2581, Prepend of one
//   pre_tokenizer   Sequence, Metaspace, Split of a Regex or String,
//                   Punctuation, ByteLevel, Digits
//   model           BPE with ByteLevel, byte_fallback or unk_token; no dropout,
//                   prefix or suffix
//   post_processor  ignored: it only adds tokens around a text
//   decoder         Sequence, ByteLevel, Replace, ByteFallback, Fuse, Strip,
//                   Metaspace: what undoes the components above
//   added_tokens    special, lstrip, rstrip, single_word, normalized
//
// Any other kind is refused by name, and so is a token of over 1024 bytes
// (kMaxTokenBytes). A document ends with the first of these tokens that the
// file has: <|endoftext|>, <|end_of_text|>, </s>, <eos>, that of DeepSeek,
// <EOS_TOKEN>, and the one given with the file. (That of a chat model ends a
// turn, so it comes last.)
//
// Four departures from the library. Special tokens are found in the text
// before it is normalized, also if the file has them found after it. Metaspace
// adds its mark before any document, as SentencePiece does; the library leaves
// it out before a space, which is lost when the tokens are decoded. (With
// add_prefix_space of ByteLevel it is lost here, too.) A Split that removes
// what its pattern does not match keeps it; the patterns that have this, those
// of GPT-4 in Phi-4 and OLMo 2, match every character. And a character that has
// no token is an error without unk_token, where the library leaves it out.
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
// other_end: what ends a document if the file has none of the usual tokens; the
// id then has its number, too.
Result<std::unique_ptr<Tokenizer>> parse_tokenizer_json(
    std::string_view text, const std::string& name,
    const Result<std::string>& other_end = std::string());

// The token that a tokenizer_config.json calls `key`: "eos_token": "</s>", or
// {"content": "</s>"}; "" if it names none.
std::string token_in_config(std::string_view config, const char* key);

// A tokenizer.json of byte-level BPE whose pieces are those of `pattern`. The
// token <|endoftext|> gets the last id.
std::string to_tokenizer_json(const std::vector<std::string>& tokens,
                              const std::vector<BpeModel::Merge>& merges,
                              const std::string& pattern);

}  // namespace remesh::tokenizer
