#include "worker/tokenizer/tokenizer_json.h"

#include <fmt/format.h>

#include <cctype>
#include <nlohmann/json.hpp>
#include <span>
#include <unordered_map>
#include <utility>

#include "proto/base/json_depth.h"
#include "proto/base/xxh3.h"
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
constexpr int kMaxDepth = 8;  // of sequences in sequences
constexpr int kMaxJsonDepth = 64;
// char::is_ascii_punctuation and the Unicode category P.
constexpr char kPunctuation[] = R"([!-/:-@\[-`{-~\p{P}])";
// The bytes whose characters in the alphabet are in the category N.
constexpr char kDigitBytes[] = R"([0-9\xB2\xB3\xB9\xBC-\xBE])";

// The value, shortened for a message.
std::string shown(const Json& json) {
  constexpr size_t kMost = 200;
  std::string text = json.dump(-1, ' ', true);
  return text.size() <= kMost ? text : text.substr(0, kMost) + "...";
}

Status unsupported(const std::string& component, const Json& json) {
  return invalid_argument(fmt::format(
      "{} {} is not supported: expected BPE as GPT-2, Llama, Mistral, Qwen, "
      "Gemma or Phi-3 has it",
      component, shown(json)));
}

// Calls visit(json, kind) for the component, or for each in a Sequence, whose
// list has the name `key`. Null is no component.
template <typename Visit>
Status for_each_component(const Json& json, const char* key, const Visit& visit,
                          int depth = 0) {
  if (json.is_null()) return ok_status();
  const auto kind = json.at("type").get<std::string>();
  if (kind != "Sequence") return visit(json, kind);
  if (depth >= kMaxDepth)
    return invalid_argument(fmt::format(
        "{}: more than {} sequences in one another", key, kMaxDepth));
  for (const Json& item : json.at(key))
    RETURN_IF_ERROR(for_each_component(item, key, visit, depth + 1));
  return ok_status();
}

// Whether the component replaces the string `from` by `to`.
bool replaces(const Json& json, const char* from, const char* to) {
  return json.at("pattern").value("String", "") == from &&
         json.at("content").get<std::string>() == to;
}

Status parse_normalizer(const Json& json, Pipeline& p) {
  const auto visit = [&](const Json& item, const std::string& kind) -> Status {
    if (kind == "NFC")
      p.nfc = true;
    else if (kind == "Prepend" &&
             item.at("prepend").get<std::string>() == kSpaceMark)
      p.prefix = Pipeline::Prefix::kText;
    else if (kind == "Replace" && replaces(item, " ", kSpaceMark))
      p.marks_spaces = true;
    else
      return unsupported("normalizer", item);
    return ok_status();
  };
  return for_each_component(json, "normalizers", visit);
}

// prepend_scheme, or add_prefix_space of older files.
Result<Pipeline::Prefix> parse_prefix(const Json& json) {
  using Prefix = Pipeline::Prefix;
  if (json.value("replacement", kSpaceMark) != kSpaceMark)
    return unsupported("Metaspace", json);
  const auto scheme =
      json.value("prepend_scheme",
                 json.value("add_prefix_space", true) ? "always" : "never");
  if (scheme == "always") return Prefix::kText;
  if (scheme == "first") return Prefix::kDocument;
  if (scheme == "never") return Prefix::kNone;
  return unsupported("Metaspace", json);
}

// A pattern that matches this text alone.
std::string literal(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (std::ispunct(static_cast<unsigned char>(c)) != 0) out += '\\';
    out += c;
  }
  return out;
}

// A Split as the pattern whose matches are pieces, as what is between them is.
// Possessive repeats need no memory for each character.
Result<std::string> parse_split(const Json& json) {
  const Json& given = json.at("pattern");
  const std::string pattern =
      given.contains("Regex") ? given.at("Regex").get<std::string>()
                              : literal(given.at("String").get<std::string>());
  const auto behavior = json.value("behavior", "Isolated");
  const bool invert = json.value("invert", false);
  if (behavior == "Isolated" || (behavior == "Removed" && invert))
    return pattern;
  const std::string match = "(?:" + pattern + ")";
  if (behavior == "Contiguous") return match + "++";
  if (behavior == (invert ? "MergedWithNext" : "MergedWithPrevious"))
    return R"([\s\S]*?)" + match + R"(|[\s\S]+)";
  if (behavior == (invert ? "MergedWithPrevious" : "MergedWithNext"))
    return match + "(?:(?!" + match + R"()[\s\S])*+)";
  return unsupported("pre_tokenizer", json);
}

// The pattern that one pre-tokenizer isolates; "" if it does not divide.
Result<std::string> parse_pattern(const Json& json, const std::string& kind,
                                  const Pipeline& p, bool byte_level) {
  if (kind == "ByteLevel") {
    if (json.value("add_prefix_space", true))
      return unsupported("pre_tokenizer", json);
    return std::string(json.value("use_regex", true) ? kGpt2Pattern : "");
  }
  if (kind == "Digits")
    return (byte_level ? std::string(kDigitBytes) : R"(\p{N})") +
           (json.value("individual_digits", false) ? "" : "+");
  const auto behavior = json.value("behavior", "Isolated");
  if (kind == "Punctuation" && behavior == "Isolated")
    return std::string(kPunctuation);
  if (kind == "Punctuation" && behavior == "Contiguous")
    return std::string(kPunctuation) + "+";
  if (kind == "Split" && json.at("pattern").value("String", "") == " " &&
      p.marks_spaces)
    return std::string();  // no space is left
  if (kind == "Split") return parse_split(json);
  return unsupported("pre_tokenizer", json);
}

Status parse_pre_tokenizer(const Json& json, Pipeline& p, bool& byte_level) {
  byte_level = false;
  const auto visit = [&](const Json& item, const std::string& kind) -> Status {
    if (kind == "Metaspace" && !byte_level && !p.marks_spaces &&
        p.splits.empty()) {
      p.marks_spaces = true;
      ASSIGN_OR_RETURN(p.prefix, parse_prefix(item));
      if (item.value("split", true)) {
        ASSIGN_OR_RETURN(Regex regex, Regex::compile("\u2581[^\u2581]*"));
        p.splits.push_back(std::move(regex));
      }
      return ok_status();
    }
    ASSIGN_OR_RETURN(const std::string pattern,
                     parse_pattern(item, kind, p, byte_level));
    // After ByteLevel, patterns see bytes in their alphabet. Those of digits
    // match the same in the bytes themselves.
    if (byte_level && kind != "Digits" &&
        pattern.find_first_not_of("[-]0123456789") != std::string::npos)
      return unsupported("after ByteLevel, pre_tokenizer", item);
    if (!pattern.empty()) {
      ASSIGN_OR_RETURN(Regex regex, byte_level
                                        ? Regex::compile_for_bytes(pattern)
                                        : Regex::compile(pattern));
      p.splits.push_back(std::move(regex));
    }
    byte_level = byte_level || kind == "ByteLevel";
    return ok_status();
  };
  return for_each_component(json, "pretokenizers", visit);
}

// Checks that the decoder undoes the other components.
Status check_decoder(const Json& json, const Pipeline& p, bool byte_level) {
  bool bytes = false;
  bool marks = false;
  bool prefix = false;
  const auto visit = [&](const Json& item, const std::string& kind) -> Status {
    if (kind == "ByteLevel") {
      bytes = true;
    } else if (kind == "Replace" && replaces(item, kSpaceMark, " ")) {
      marks = true;
    } else if (kind == "Strip" && item.at("content") == " " &&
               item.at("start") == 1 && item.at("stop") == 0) {
      prefix = true;
    } else if (kind == "Metaspace") {
      marks = true;
      ASSIGN_OR_RETURN(const auto kept, parse_prefix(item));
      prefix = kept != Pipeline::Prefix::kNone;
    } else if (kind != "ByteFallback" && kind != "Fuse") {
      return unsupported("decoder", item);
    }
    return ok_status();
  };
  RETURN_IF_ERROR(for_each_component(json, "decoders", visit));
  if (bytes != byte_level || marks != p.marks_spaces ||
      prefix != (p.prefix != Pipeline::Prefix::kNone))
    return invalid_argument(fmt::format(
        "decoder {}: does not undo the normalizer and the pre_tokenizer",
        json.dump()));
  return ok_status();
}

// Sets nfc, marks_spaces, prefix and splits of the pipeline, and whether the
// model sees bytes in their alphabet.
Status parse_components(const Json& file, Pipeline& p, bool& byte_level) {
  static const Json kNull;
  const auto component = [&](const char* key) -> const Json& {
    return file.contains(key) ? file[key] : kNull;
  };
  RETURN_IF_ERROR(parse_normalizer(component("normalizer"), p));
  RETURN_IF_ERROR(
      parse_pre_tokenizer(component("pre_tokenizer"), p, byte_level));
  if (p.marks_spaces ? byte_level : p.prefix != Pipeline::Prefix::kNone)
    return unsupported("with ByteLevel, or without Replace, U+2581 in",
                       component("normalizer"));
  return check_decoder(component("decoder"), p, byte_level);
}

// The largest vocabularies have some 260,000 tokens.
constexpr int64_t kMaxId = (int64_t{1} << 22) - 1;

// The tokens as the file writes them.
struct Vocabulary {
  std::vector<std::string> names;  // by id; "": no such token
  std::unordered_map<std::string, int32_t> ids;

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
    if (!number.is_number_integer() || id < 0 || id > kMaxId)
      return invalid_argument(
          fmt::format("token '{}': id {}: must be an integer from 0 to {}",
                      name, number.dump(), kMaxId));
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

Status check_model_kind(const Json& model, bool byte_level) {
  const char* otherwise = model.contains("merges") ? "BPE" : "";
  if (model.value("type", otherwise) != "BPE")
    return unsupported("model", model.value("type", otherwise));
  for (const char* key :
       {"continuing_subword_prefix", "end_of_word_suffix", "dropout"})
    if (is_set(model, key))
      return unsupported(fmt::format("model: {}", key), model[key]);
  if (!byte_level && !is_set(model, "byte_fallback"))
    return unsupported("model: without ByteLevel, byte_fallback", false);
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

Status parse_added(const Json& list, Vocabulary& vocabulary, Pipeline& p) {
  for (const Json& item : list) {
    const auto text = item.at("content").get<std::string>();
    RETURN_IF_ERROR(vocabulary.add(text, item.at("id")));
    if (text.empty()) continue;
    const bool special = is_set(item, "special");
    if (is_set(item, "single_word") || (!special && (p.nfc || p.marks_spaces) &&
                                        item.value("normalized", true)))
      return unsupported("with single_word or a normalizer, added token", item);
    p.added[text] = {*vocabulary.find(text), special, is_set(item, "lstrip"),
                     is_set(item, "rstrip")};
  }
  return ok_status();
}

// The bytes that a token stands for.
std::string decode_token(const std::string& name, const BpeModel& model,
                         bool marks_spaces) {
  if (model.byte_level) return from_alphabet(name);
  if (const auto byte = byte_of(name)) return std::string(1, *byte);
  return marks_spaces ? unmark_spaces(name) : name;
}

Result<std::unique_ptr<Tokenizer>> build(const Json& json, std::string id) {
  Pipeline p;
  p.id = std::move(id);
  bool byte_level = false;
  RETURN_IF_ERROR(parse_components(json, p, byte_level));
  const Json& model = json.at("model");
  RETURN_IF_ERROR(check_model_kind(model, byte_level));
  Vocabulary vocabulary;
  for (const auto& [name, number] : model.at("vocab").items())
    RETURN_IF_ERROR(vocabulary.add(name, number));
  ASSIGN_OR_RETURN(BpeModel bpe, parse_model(model, vocabulary, byte_level));
  if (p.marks_spaces) RETURN_IF_ERROR(divide_before_marks(bpe, &p));
  if (json.contains("added_tokens"))
    RETURN_IF_ERROR(parse_added(json["added_tokens"], vocabulary, p));
  for (const std::string& name : vocabulary.names) {
    const auto added = p.added.find(name);
    if (added == p.added.end())
      p.decoded.push_back(decode_token(name, bpe, p.marks_spaces));
    else  // of Gemma, runs of marks
      p.decoded.push_back(!added->second.special && p.marks_spaces
                              ? unmark_spaces(name)
                              : name);
  }
  ASSIGN_OR_RETURN(p.bpe, Bpe::make(std::move(bpe)));
  // A special token rather than a piece of text: Gemma has the tag </s>.
  for (const bool special : {true, false})
    for (const char* end : kEnds) {
      const auto found = vocabulary.find(end);
      const auto added = p.added.find(end);
      if (!found.ok() ||
          special != (added != p.added.end() && added->second.special))
        continue;
      p.end_of_text = *found;
      return make_tokenizer(std::move(p));
    }
  return invalid_argument(fmt::format(
      "no token ends a document: expected one of {}", fmt::join(kEnds, ", ")));
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> parse_tokenizer_json(
    std::string_view text, const std::string& name) {
  if (json_is_deeper(text, kMaxJsonDepth))
    return invalid_argument(
        fmt::format("{}: nested more than {} deep", name, kMaxJsonDepth));
  try {
    auto built = build(
        Json::parse(text),
        "tokenizer.json:" + hex(xxh3_128(std::as_bytes(std::span(text)))));
    if (!built.ok()) return built.status().with_context(name);
    return built;
  } catch (const Json::exception& e) {
    const std::string what = e.what();
    const size_t end = what.find("] ");
    return invalid_argument(
        fmt::format("{}: not a tokenizer.json: {}", name,
                    end == std::string::npos ? what : what.substr(end + 2)));
  }
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
