#include "worker/tokenizer/tokenizer_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "proto/base/file_system.h"
#include "proto/base/json_depth.h"
#include "proto/base/text.h"
#include "worker/tokenizer/components.h"
#include "worker/tokenizer/pipeline.h"
#include "worker/tokenizer/unicode.h"

namespace remesh::tokenizer {
namespace {

using Json = nlohmann::json;

// What ends a document, in this order: of GPT-2 and Qwen, Llama 3, Llama 2,
// Gemma, DeepSeek and Command R.
constexpr const char* kEnds[] = {"<|endoftext|>",
                                 "<|end_of_text|>",
                                 "</s>",
                                 "<eos>",
                                 "<\uFF5Cend\u2581of\u2581sentence\uFF5C>",
                                 "<EOS_TOKEN>"};
constexpr int kMaxJsonDepth = 64;

// The largest vocabularies have some 260,000 tokens.
constexpr int64_t kMaxId = (int64_t{1} << 22) - 1;
// Ids that no token has take memory, too: there may be so many of them, and as
// many as there are tokens.
constexpr int64_t kMaxHoles = 1 << 16;

// The tokens as the file writes them.
struct Vocabulary {
  std::vector<std::string> names;  // by id; "": no such token
  std::unordered_map<std::string, int32_t> ids;
  int64_t tokens = 0;  // that the file has

  Result<int32_t> find(const std::string& name) const {
    const auto it = ids.find(name);
    if (it == ids.end())
      return invalid_argument(
          fmt::format("'{}' is not in the vocabulary", name));
    return it->second;
  }
  Status add(const std::string& name, const Json& number) {
    if (name.size() > kMaxTokenBytes)
      return invalid_argument(
          fmt::format("token {}: has {} bytes; at most {} are allowed",
                      shown(name), name.size(), kMaxTokenBytes));
    const int64_t id = number.get<int64_t>();
    const int64_t max_id = std::min(kMaxId, kMaxHoles + 2 * tokens);
    if (!number.is_number_integer() || id < 0 || id > max_id)
      return invalid_argument(
          fmt::format("token {}: id {}: must be an integer from 0 to {} where "
                      "there are {} tokens",
                      shown(name), number.dump(), max_id, tokens));
    const auto at = static_cast<size_t>(id);
    if (names.size() <= at) names.resize(at + 1);
    if (name.empty()) return ok_status();  // an id that stands for nothing
    const auto [known, is_new] = ids.emplace(name, static_cast<int32_t>(id));
    if ((!names[at].empty() && names[at] != name) || known->second != id)
      return invalid_argument(fmt::format(
          "token '{}' with id {}: '{}' has that id, or the token has another",
          name, id, names[at]));
    names[at] = name;
    return ok_status();
  }
};

// Null and false are the same as no value.
bool is_set(const Json& json, const char* key) {
  return json.contains(key) && !json[key].is_null() && json[key] != false &&
         json[key] != "" && json[key] != 0;
}

Status check_model_kind(const Json& model) {
  const char* otherwise = model.contains("merges") ? "BPE" : "";
  if (model.value("type", otherwise) != "BPE")
    return unsupported("model", model.value("type", otherwise));
  for (const char* key :
       {"continuing_subword_prefix", "end_of_word_suffix", "dropout"})
    if (is_set(model, key))
      return unsupported(fmt::format("model: {}", key), model[key]);
  return ok_status();
}

// "left right" or ["left", "right"]. Tokens may have spaces.
Result<BpeModel::Merge> parse_merge(const Json& json,
                                    const Vocabulary& vocabulary) {
  std::string left;
  std::string right;
  if (json.is_array() && json.size() == 2) {
    left = json[0].get<std::string>();
    right = json[1].get<std::string>();
  } else {
    const auto text = json.get<std::string>();
    // Every space is tried.
    if (text.size() > 2 * kMaxTokenBytes + 1)
      return invalid_argument(fmt::format(
          "expected two tokens of at most {} bytes", kMaxTokenBytes));
    size_t space = text.find(' ');
    if (space == std::string::npos)
      return invalid_argument("expected two tokens");
    while (space != text.rfind(' ') &&
           !(vocabulary.ids.contains(text.substr(0, space)) &&
             vocabulary.ids.contains(text.substr(space + 1))))
      space = text.find(' ', space + 1);
    left = text.substr(0, space);
    right = text.substr(space + 1);
  }
  BpeModel::Merge m;
  ASSIGN_OR_RETURN(m.left, vocabulary.find(left));
  ASSIGN_OR_RETURN(m.right, vocabulary.find(right));
  ASSIGN_OR_RETURN(m.result, vocabulary.find(left + right));
  return m;
}

Result<BpeModel> parse_model(const Json& model, const Vocabulary& vocabulary,
                             bool byte_level) {
  BpeModel bpe;
  bpe.byte_level = byte_level;
  bpe.ignore_merges = is_set(model, "ignore_merges");
  bpe.byte_fallback = is_set(model, "byte_fallback");
  bpe.fuse_unknown = is_set(model, "fuse_unk");
  // Some files name one that they do not have.
  if (is_set(model, "unk_token"))
    if (const auto unknown =
            vocabulary.find(model["unk_token"].get<std::string>());
        unknown.ok())
      bpe.unknown = *unknown;
  if (!byte_level && !bpe.byte_fallback && bpe.unknown < 0)
    return unsupported(
        "model: without ByteLevel, and without byte_fallback and unk_token, "
        "BPE",
        model.value("unk_token", Json()));
  // A name outside the alphabet is that of an added token.
  for (const std::string& name : vocabulary.names)
    bpe.tokens.push_back(byte_level ? from_alphabet(name) : name);
  for (const Json& item : model.at("merges")) {
    auto merge = parse_merge(item, vocabulary);
    if (!merge.ok()) return merge.status().with_context("merge " + shown(item));
    merge->rank = static_cast<uint32_t>(bpe.merges.size());
    bpe.merges.push_back(*merge);
  }
  return bpe;
}

// By id: the text that is found, which the decoder sees, or of a special token
// does not.
struct Found {
  std::string text;
  bool special = false;
};
using FoundById = std::unordered_map<int32_t, Found>;

Result<FoundById> parse_added(const Json& list, Vocabulary& vocabulary,
                              Pipeline& p) {
  FoundById out;
  Matcher matcher;
  for (const Json& item : list) {
    const auto content = item.at("content").get<std::string>();
    RETURN_IF_ERROR(vocabulary.add(content, item.at("id")));
    if (content.empty()) continue;
    ASSIGN_OR_RETURN(const int32_t id, vocabulary.find(content));
    const AddedToken token{.id = id,
                           .special = is_set(item, "special"),
                           .strip_left = is_set(item, "lstrip"),
                           .strip_right = is_set(item, "rstrip"),
                           .single_word = is_set(item, "single_word")};
    const bool normalized = !token.special && item.value("normalized", true);
    std::string_view text = content;
    std::string held;
    if (normalized)
      RETURN_IF_ERROR(apply_steps(p.normalizer, {}, matcher, &text, &held));
    out[id] = {std::string(text), token.special};
    if (text.empty()) continue;  // nothing is left to be found
    (normalized ? p.normalized_added : p.added).add(out[id].text, token);
  }
  return out;
}

// The bytes that each token stands for.
Status decode_tokens(const Vocabulary& vocabulary, const FoundById& added,
                     const BpeModel& model, const Components& c, Pipeline& p) {
  Matcher matcher;
  for (size_t id = 0; id < vocabulary.names.size(); ++id) {
    const auto found = added.find(static_cast<int32_t>(id));
    std::string_view text =
        found == added.end() ? vocabulary.names[id] : found->second.text;
    std::string held;
    if (found == added.end() || !found->second.special)
      RETURN_IF_ERROR(apply_steps(c.decoder, {}, matcher, &text, &held));
    if (text.size() > kMaxTokenBytes)
      return invalid_argument(
          fmt::format("token {}: stands for {} bytes; at most {} are allowed",
                      id, text.size(), kMaxTokenBytes));
    std::string bytes(text);
    if (found == added.end() && model.byte_level)
      bytes = from_alphabet(bytes);
    else if (const auto byte = byte_of(bytes);
             found == added.end() && byte && model.byte_fallback)
      bytes.assign(1, *byte);
    p.decoded.push_back(std::move(bytes));
  }
  return ok_status();
}

Result<std::unique_ptr<Tokenizer>> build(const Json& json,
                                         const std::string& hash,
                                         const Result<std::string>& other_end) {
  Pipeline p;
  p.id = "tokenizer.json:" + hash;
  ASSIGN_OR_RETURN(Components c, parse_components(json, p));
  const Json& model = json.at("model");
  RETURN_IF_ERROR(check_model_kind(model));
  const Json added_tokens = json.value("added_tokens", Json::array());
  Vocabulary vocabulary;
  vocabulary.tokens =
      static_cast<int64_t>(model.at("vocab").size() + added_tokens.size());
  for (const auto& [name, number] : model.at("vocab").items())
    RETURN_IF_ERROR(vocabulary.add(name, number));
  ASSIGN_OR_RETURN(BpeModel bpe, parse_model(model, vocabulary, c.byte_level));
  if (bpe.unknown >= 0 && !c.byte_level && !bpe.byte_fallback)
    c.lossy.emplace_back("unk_token");
  p.changes = join(c.lossy);
  if (c.marks_spaces) RETURN_IF_ERROR(divide_before_marks(bpe, &p));
  ASSIGN_OR_RETURN(const FoundById added,
                   parse_added(added_tokens, vocabulary, p));
  RETURN_IF_ERROR(decode_tokens(vocabulary, added, bpe, c, p));
  ASSIGN_OR_RETURN(p.bpe, Bpe::make(std::move(bpe)));
  // A special token rather than a piece of text: Gemma has the tag </s>.
  for (const bool special : {true, false})
    for (const char* end : kEnds) {
      const auto found = vocabulary.find(end);
      if (!found.ok()) continue;
      const auto token = added.find(*found);
      if (special != (token != added.end() && token->second.special)) continue;
      p.end_of_text = *found;
      return make_tokenizer(std::move(p));
    }
  RETURN_IF_ERROR(other_end.status());
  const auto other = vocabulary.find(*other_end);
  if (!other.ok())
    return invalid_argument(fmt::format(
        "no token ends a document: expected one of {}, or the eos_token in a "
        "tokenizer_config.json beside it",
        fmt::join(kEnds, ", ")));
  p.end_of_text = *other;
  p.id = fmt::format("tokenizer.json:end={}:{}", *other, hash);
  return make_tokenizer(std::move(p));
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> parse_tokenizer_json(
    std::string_view text, const std::string& name,
    const Result<std::string>& other_end) {
  if (json_is_deeper(text, kMaxJsonDepth))
    return invalid_argument(
        fmt::format("{}: nested more than {} deep", name, kMaxJsonDepth));
  try {
    return build(Json::parse(text), xxh128_text(text), other_end)
        .with_context(name);
  } catch (const Json::exception& e) {
    const std::string what = e.what();
    const size_t end = what.find("] ");
    return invalid_argument(
        fmt::format("{}: not a tokenizer.json: {}", name,
                    end == std::string::npos ? what : what.substr(end + 2)));
  }
}

std::string token_in_config(std::string_view config, const char* key) {
  if (json_is_deeper(config, kMaxJsonDepth)) return "";
  const Json json = Json::parse(config, nullptr, /*exceptions=*/false);
  if (!json.is_object()) return "";
  Json token = json.value(key, Json());
  if (token.is_object()) token = Json(token.value("content", Json()));
  return token.is_string() ? token.get<std::string>() : "";
}

std::string to_tokenizer_json(const std::vector<std::string>& tokens,
                              const std::vector<BpeModel::Merge>& merges,
                              const std::string& pattern) {
  const auto name = [&](int32_t id) {
    return to_alphabet(tokens[static_cast<size_t>(id)]);
  };
  Json file = Json::parse(R"({
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [{"content": "<|endoftext|>", "single_word": false,
      "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
    "normalizer": null,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
      {"type": "Split", "behavior": "Isolated", "invert": false},
      {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
       "use_regex": false}]},
    "post_processor": null,
    "decoder": {"type": "ByteLevel", "add_prefix_space": false,
      "trim_offsets": true, "use_regex": false},
    "model": {"type": "BPE", "dropout": null, "unk_token": null,
      "continuing_subword_prefix": null, "end_of_word_suffix": null,
      "fuse_unk": false, "byte_fallback": false, "ignore_merges": false}})");
  file["added_tokens"][0]["id"] = tokens.size();
  file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern;
  Json& model = file["model"];
  for (size_t id = 0; id < tokens.size(); ++id)
    model["vocab"][to_alphabet(tokens[id])] = id;
  model["merges"] = Json::array();
  for (const BpeModel::Merge& m : merges)
    model["merges"].push_back(name(m.left) + " " + name(m.right));
  return file.dump(1) + "\n";
}

}  // namespace remesh::tokenizer
