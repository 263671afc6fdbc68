#include "worker/tokenizer/tiktoken.h"

#include <fmt/format.h>
#include <sodium.h>

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

#include "proto/base/file_system.h"
#include "worker/tokenizer/pipeline.h"

namespace remesh::tokenizer {
namespace {

constexpr char kO200kPattern[] =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*)"
    R"([\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+)"
    R"([\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|)"
    R"( ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// What a file does not have, by the number of its ranks. The ids of special
// tokens count from there.
struct Known {
  const char* name;
  size_t ranks;
  const char* pattern;
  size_t others;  // ids after the ranks, with those of no token
  size_t end_of_text;
  std::vector<std::pair<const char*, size_t>> special;
};

const std::array<Known, 4>& known_vocabularies() {
  static const std::array<Known, 4> kKnown = {
      {{"gpt2", 50256, kGpt2Pattern, 1, 0, {{"<|endoftext|>", 0}}},
       {"cl100k",
        100256,
        kLlama3Pattern,
        21,
        1,
        {{"<|endoftext|>", 1},
         {"<|fim_prefix|>", 2},
         {"<|fim_middle|>", 3},
         {"<|fim_suffix|>", 4},
         {"<|endofprompt|>", 20}}},
       {"llama3",
        128000,
        kLlama3Pattern,
        256,
        1,
        {{"<|begin_of_text|>", 0},
         {"<|end_of_text|>", 1},
         {"<|start_header_id|>", 6},
         {"<|end_header_id|>", 7},
         {"<|eot_id|>", 9}}},
       {"o200k",
        199998,
        kO200kPattern,
        21,
        1,
        {{"<|endoftext|>", 1}, {"<|endofprompt|>", 20}}}}};
  return kKnown;
}

Result<std::vector<std::string>> parse_tokens(std::string_view text) {
  std::vector<std::string> tokens;
  std::array<char, kMaxTokenBytes> token;
  const size_t most = known_vocabularies().back().ranks;
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (tokens.size() == most)
      return invalid_argument(fmt::format(
          "line {}: at most {} tokens are supported", tokens.size() + 1, most));
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
  const auto& all = known_vocabularies();
  const auto* const known = std::find_if(
      all.begin(), all.end(), [&](const Known& k) { return k.ranks == ranks; });
  if (known == all.end())
    return invalid_argument(fmt::format(
        "a tiktoken file of {} tokens is not supported: expected 50256 "
        "(GPT-2), 100256 (cl100k), 128000 (Llama 3) or 199998 (o200k)",
        ranks));
  Pipeline p;
  p.id = fmt::format("{}:{}", known->name, xxh128_text(text));
  p.end_of_text = static_cast<int32_t>(ranks + known->end_of_text);
  p.decoded = tokens;
  p.decoded.resize(ranks + known->others);
  for (const auto& [name, after] : known->special) {
    p.decoded[ranks + after] = name;
    p.added.add(name,
                {.id = static_cast<int32_t>(ranks + after), .special = true});
  }
  std::vector<BpeModel::Merge> merges = merges_of(tokens);
  ASSIGN_OR_RETURN(p.bpe, Bpe::make({.tokens = std::move(tokens),
                                     .merges = std::move(merges),
                                     .byte_level = true,
                                     .ignore_merges = true}));
  ASSIGN_OR_RETURN(Regex pattern, Regex::compile(known->pattern));
  p.splits.push_back({std::move(pattern)});
  return make_tokenizer(std::move(p));
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> parse_tiktoken(std::string_view text,
                                                  const std::string& name) {
  return build(text).with_context(name);
}

}  // namespace remesh::tokenizer
