// SentencePiece models (tokenizer.model) of type BPE with byte_fallback, as
// Llama 2, Mistral, Gemma and Phi-3 have them (Kudo and Richardson 2018;
// google/sentencepiece).
//
//   normalizer_spec  no precompiled_charsmap (the rule `identity`);
//                    add_dummy_prefix, remove_extra_whitespaces
//   pieces           NORMAL, BYTE, USER_DEFINED and CONTROL; UNUSED ones if no
//                    text becomes them
//
// Any other kind is refused by name. Tokens are those of the library, with one
// departure: bytes that are not UTF-8 become their own BYTE pieces, where the
// library replaces them by U+FFFD.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "proto/base/status.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::tokenizer {

// Fails, naming `name` and the setting or piece, on what is invalid or not
// supported.
Result<std::unique_ptr<Tokenizer>> parse_sentencepiece(std::string_view file,
                                                       const std::string& name);

}  // namespace remesh::tokenizer
