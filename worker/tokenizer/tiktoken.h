// tiktoken files: a line "BASE64 RANK" for each token (openai/tiktoken). The
// rank is the id, and any two adjacent tokens merge whose bytes together are a
// token, that of lowest rank first.
//
// The file has neither the pattern of the pieces nor the special tokens. They
// are known for four vocabularies, which are told by their size:
//
//   GPT-2    50,256 ranks   <|endoftext|> is 50256 (also named r50k)
//   cl100k   100,256 ranks  <|endoftext|> is 100257 (GPT-4, Phi-4)
//   Llama 3  128,000 ranks  <|begin_of_text|> is 128000, <|end_of_text|> 128001
//   o200k    199,998 ranks  <|endoftext|> is 199999 (GPT-4o)
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "proto/base/status.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::tokenizer {

// Fails, naming `name` and the line, on what is invalid.
Result<std::unique_ptr<Tokenizer>> parse_tiktoken(std::string_view text,
                                                  const std::string& name);

}  // namespace remesh::tokenizer
