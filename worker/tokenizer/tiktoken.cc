#include "worker/tokenizer/tiktoken.h"

#include <fmt/format.h>
#include <sodium.h>

#include <algorithm>
#include <array>
#include <map>
#include <span>
#include <unordered_map>
#include <utility>

#include "proto/base/xxh3.h"
#include "worker/tokenizer/pipeline.h"

namespace remesh::tokenizer {
namespace {

constexpr size_t kGpt2Ranks = 50256;
constexpr size_t kLlama3Ranks = 128000;

Result<std::vector<std::string>> parse_tokens(std::string_view text) {
  std::vector<std::string> tokens;
  std::array<char, kMaxTokenBytes> token;
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (tokens.size() == kLlama3Ranks)
      return invalid_argument(
          fmt::format("line {}: at most {} tokens are supported",
                      tokens.size() + 1, kLlama3Ranks));
    const std::string rank = fmt::format(" {}", tokens.size());
    size_t size = 0;
    if (!line.ends_with(rank) ||
        sodium_base642bin(reinterpret_cast<unsigned char*>(token.data()),
                          token.size(), line.data(), line.size() - rank.size(),
                          nullptr, &size, nullptr,
                          sodium_base64_VARIANT_ORIGINAL) != 0 ||
        size == 0)
      return invalid_argument(fmt::format(
          "line {}: expected a token of 1 to {} bytes in base64, and its "
          "rank{}",
          tokens.size() + 1, kMaxTokenBytes, rank));
    tokens.emplace_back(token.data(), size);
  }
  return tokens;
}

// All pairs of tokens that together are a token.
std::vector<BpeModel::Merge> merges_of(const std::vector<std::string>& tokens) {
  std::unordered_map<std::string_view, int32_t> ids;
  for (const std::string& token : tokens)
    ids.emplace(token, static_cast<int32_t>(ids.size()));
  std::vector<BpeModel::Merge> merges;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string_view token = tokens[i];
    for (size_t cut = 1; cut < token.size(); ++cut) {
      const auto left = ids.find(token.substr(0, cut));
      if (left == ids.end()) continue;
      const auto right = ids.find(token.substr(cut));
      if (right != ids.end())
        merges.push_back({left->second, right->second, static_cast<int32_t>(i),
                          static_cast<uint32_t>(i)});
    }
  }
  return merges;
}

Result<std::unique_ptr<Tokenizer>> build(std::string_view text) {
  ASSIGN_OR_RETURN(std::vector<std::string> tokens, parse_tokens(text));
  const size_t ranks = tokens.size();
  const bool llama3 = ranks == kLlama3Ranks;
  if (!llama3 && ranks != kGpt2Ranks)
    return invalid_argument(
        fmt::format("a tiktoken file of {} tokens is not supported: expected "
                    "{} (GPT-2) or {} (Llama 3)",
                    ranks, kGpt2Ranks, kLlama3Ranks));
  std::map<std::string, size_t> special = {{"<|endoftext|>", 0}};
  if (llama3)
    special = {{"<|begin_of_text|>", 0},
               {"<|end_of_text|>", 1},
               {"<|start_header_id|>", 6},
               {"<|end_header_id|>", 7},
               {"<|eot_id|>", 9}};
  Pipeline p;
  p.id = fmt::format("{}:{}", llama3 ? "llama3" : "gpt2",
                     hex(xxh3_128(std::as_bytes(std::span(text)))));
  p.end_of_text = static_cast<int32_t>(ranks + (llama3 ? 1 : 0));
  p.decoded = tokens;
  p.decoded.resize(ranks + (llama3 ? 256 : 1));
  for (const auto& [name, after] : special) {
    p.decoded[ranks + after] = name;
    p.added[name] = {.id = static_cast<int32_t>(ranks + after),
                     .special = true};
  }
  std::vector<BpeModel::Merge> merges = merges_of(tokens);
  ASSIGN_OR_RETURN(p.bpe, Bpe::make({.tokens = std::move(tokens),
                                     .merges = std::move(merges),
                                     .byte_level = true,
                                     .ignore_merges = true}));
  ASSIGN_OR_RETURN(Regex pattern,
                   Regex::compile(llama3 ? kLlama3Pattern : kGpt2Pattern));
  p.splits.push_back(std::move(pattern));
  return make_tokenizer(std::move(p));
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> parse_tiktoken(std::string_view text,
                                                  const std::string& name) {
  auto built = build(text);
  if (!built.ok()) return built.status().with_context(name);
  return built;
}

}  // namespace remesh::tokenizer
