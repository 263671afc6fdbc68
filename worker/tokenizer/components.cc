#include "worker/tokenizer/components.h"

#include <fmt/format.h>

#include <cctype>
#include <unordered_map>
#include <utility>

#include "worker/tokenizer/unicode.h"

namespace remesh::tokenizer {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 8;  // of sequences in sequences
// char::is_ascii_punctuation and the Unicode category P.
constexpr char kPunctuation[] = R"([!-/:-@\[-`{-~\p{P}])";
// The bytes whose characters in the alphabet are in the category N.
constexpr char kDigitBytes[] = R"([0-9\xB2\xB3\xB9\xBC-\xBE])";

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

// Every match becomes the content, in which nothing has a special meaning.
Result<TextStep> parse_replace(const Json& json) {
  const Json& pattern = json.at("pattern");
  auto content = json.at("content").get<std::string>();
  if (pattern.contains("String")) {
    auto text = pattern["String"].get<std::string>();
    if (text.empty()) return unsupported("without a text,", json);
    return replace(std::move(text), std::move(content));
  }
  ASSIGN_OR_RETURN(Regex regex,
                   Regex::compile(pattern.at("Regex").get<std::string>()));
  if (regex.may_match_nothing())
    return unsupported("with a pattern that matches where there is no text,",
                       json);
  return replace(std::move(regex), std::move(content));
}

Status parse_normalizer(const Json& json, Pipeline& p, Components& c) {
  static const std::unordered_map<std::string, NormalForm> kForms = {
      {"NFC", NormalForm::kC},
      {"NFD", NormalForm::kD},
      {"NFKC", NormalForm::kKC},
      {"NFKD", NormalForm::kKD}};
  const auto visit = [&](const Json& item, const std::string& kind) -> Status {
    const bool marks = kind == "Replace" && replaces(item, " ", kSpaceMark);
    c.marks_spaces = c.marks_spaces || marks;
    c.no_spaces = marks || (c.no_spaces && kind == "Prepend");
    if (const auto form = kForms.find(kind); form != kForms.end()) {
      p.normalizer.push_back(to_normal_form(form->second));
    } else if (kind == "Lowercase") {
      p.normalizer.push_back(to_lowercase());
    } else if (kind == "Strip") {
      p.normalizer.push_back(strip(item.at("strip_left").get<bool>(),
                                   item.at("strip_right").get<bool>()));
    } else if (kind == "Prepend" &&
               item.at("prepend").get<std::string>() == kSpaceMark) {
      p.normalizer.push_back(prepend(kSpaceMark));
      c.prefix_mark = true;
    } else if (kind == "Replace") {
      ASSIGN_OR_RETURN(TextStep step, parse_replace(item));
      p.normalizer.push_back(std::move(step));
    } else {
      return unsupported("normalizer", item);
    }
    if (!marks && kind != "Prepend" && kind != "NFC" && kind != "NFD")
      c.lossy.push_back(kind);
    return ok_status();
  };
  return for_each_component(json, "normalizers", visit);
}

// Before which texts Metaspace adds its mark.
enum class Prefix { kNone, kDocument, kText };

// prepend_scheme, or add_prefix_space of older files.
Result<Prefix> parse_prefix(const Json& json) {
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

bool removes_matches(const Json& json, const std::string& kind) {
  return (kind == "Split" || kind == "Punctuation") &&
         json.value("behavior", "") == "Removed" &&
         !json.value("invert", false);
}

// What divides a text where `pattern` matches, as the pattern whose matches are
// pieces, as what is between them is. Possessive repeats need no memory for
// each character.
Result<std::string> with_behavior(const Json& json,
                                  const std::string& pattern) {
  const auto behavior = json.value("behavior", "Isolated");
  const bool invert = json.value("invert", false);
  if (behavior == "Isolated" || behavior == "Removed") return pattern;
  const std::string match = "(?:" + pattern + ")";
  if (behavior == "Contiguous") return match + "++";
  if (behavior == (invert ? "MergedWithNext" : "MergedWithPrevious"))
    return R"([\s\S]*?)" + match + R"(|[\s\S]+)";
  if (behavior == (invert ? "MergedWithPrevious" : "MergedWithNext"))
    return match + "(?:(?!" + match + R"()[\s\S])*+)";
  return unsupported("pre_tokenizer", json);
}

// The pattern of what one pre-tokenizer isolates or removes; "" if it does not
// divide.
Result<std::string> parse_pattern(const Json& json, const std::string& kind,
                                  const Components& c) {
  if (kind == "ByteLevel")
    return std::string(json.value("use_regex", true) ? kGpt2Pattern : "");
  if (kind == "Digits")
    return (c.byte_level ? std::string(kDigitBytes) : R"(\p{N})") +
           (json.value("individual_digits", false) ? "" : "+");
  if (kind == "Punctuation") return with_behavior(json, kPunctuation);
  if (kind != "Split") return unsupported("pre_tokenizer", json);
  const Json& given = json.at("pattern");
  if (c.no_spaces && given.value("String", "") == " ") return std::string();
  return with_behavior(json,
                       given.contains("Regex")
                           ? given["Regex"].get<std::string>()
                           : literal(given.at("String").get<std::string>()));
}

// The steps of Metaspace, and that of ByteLevel with add_prefix_space.
Status parse_metaspace(const Json& json, Pipeline& p, Components& c) {
  if (c.byte_level || c.marks_spaces || c.prefix_mark || !p.splits.empty())
    return unsupported("pre_tokenizer", json);
  ASSIGN_OR_RETURN(const Prefix prefix, parse_prefix(json));
  p.prefix.push_back(replace(" ", kSpaceMark));
  if (prefix != Prefix::kNone) p.prefix.push_back(prepend(kSpaceMark));
  p.restarts = prefix == Prefix::kText;
  c.prefix_mark = prefix != Prefix::kNone;
  c.marks_spaces = c.no_spaces = true;
  if (!json.value("split", true)) return ok_status();
  ASSIGN_OR_RETURN(Regex regex, Regex::compile("\u2581[^\u2581]*"));
  p.splits.push_back({std::move(regex)});
  return ok_status();
}
Status parse_prefix_space(const Json& json, Pipeline& p, Components& c) {
  if (c.byte_level || !p.splits.empty())
    return unsupported("after another one, pre_tokenizer", json);
  p.prefix.push_back(prepend(" ", /*once=*/true));
  p.restarts = p.adds_space = true;
  c.lossy.emplace_back("add_prefix_space");
  return ok_status();
}

Status parse_pre_tokenizer(const Json& json, Pipeline& p, Components& c) {
  const auto visit = [&](const Json& item, const std::string& kind) -> Status {
    if (kind == "Metaspace") return parse_metaspace(item, p, c);
    if (kind == "ByteLevel" && item.value("add_prefix_space", true))
      RETURN_IF_ERROR(parse_prefix_space(item, p, c));
    ASSIGN_OR_RETURN(const std::string pattern, parse_pattern(item, kind, c));
    // After ByteLevel, patterns see bytes in their alphabet. Those of digits
    // match the same in the bytes themselves.
    if (c.byte_level && kind != "Digits" &&
        pattern.find_first_not_of("[-]0123456789") != std::string::npos)
      return unsupported("after ByteLevel, pre_tokenizer", item);
    if (!pattern.empty()) {
      ASSIGN_OR_RETURN(Regex regex, c.byte_level
                                        ? Regex::compile_for_bytes(pattern)
                                        : Regex::compile(pattern));
      p.splits.push_back({std::move(regex), removes_matches(item, kind)});
      if (p.splits.back().removes) c.lossy.push_back(kind);
    }
    c.byte_level = c.byte_level || kind == "ByteLevel";
    return ok_status();
  };
  return for_each_component(json, "pretokenizers", visit);
}

// Takes the steps of the decoder, and checks that it undoes the marks and bytes
// of the other components.
Status parse_decoder(const Json& json, Components& c) {
  bool bytes = false;
  bool marks = false;
  bool prefix = false;
  bool joined = false;  // the tokens are a text already
  const auto visit = [&](const Json& item, const std::string& kind) -> Status {
    if (kind == "ByteLevel") {
      bytes = joined = true;
    } else if (kind == "Replace" &&
               (!joined || replaces(item, kSpaceMark, " "))) {
      ASSIGN_OR_RETURN(TextStep step, parse_replace(item));
      c.decoder.push_back(std::move(step));
      marks = marks || replaces(item, kSpaceMark, " ");
    } else if (kind == "Strip" && item.at("content") == " " &&
               item.at("start") == 1 && item.at("stop") == 0) {
      prefix = true;
    } else if (kind == "Metaspace") {
      c.decoder.push_back(replace(kSpaceMark, " "));
      marks = true;
      ASSIGN_OR_RETURN(const auto kept, parse_prefix(item));
      prefix = kept != Prefix::kNone;
    } else if (kind == "Fuse") {
      joined = true;
    } else if (kind != "ByteFallback") {
      return unsupported("decoder", item);
    }
    return ok_status();
  };
  RETURN_IF_ERROR(for_each_component(json, "decoders", visit));
  if (bytes != c.byte_level || marks != c.marks_spaces ||
      prefix != c.prefix_mark)
    return invalid_argument(fmt::format(
        "decoder {}: does not undo the normalizer and the pre_tokenizer",
        json.dump()));
  return ok_status();
}

}  // namespace

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

Result<Components> parse_components(const Json& file, Pipeline& p) {
  static const Json kNull;
  const auto component = [&](const char* key) -> const Json& {
    return file.contains(key) ? file[key] : kNull;
  };
  Components c;
  RETURN_IF_ERROR(parse_normalizer(component("normalizer"), p, c));
  RETURN_IF_ERROR(parse_pre_tokenizer(component("pre_tokenizer"), p, c));
  if (c.marks_spaces ? c.byte_level : c.prefix_mark)
    return unsupported("with ByteLevel, or without Replace, U+2581 in",
                       component("normalizer"));
  RETURN_IF_ERROR(parse_decoder(component("decoder"), c));
  p.adds_space = p.adds_space || c.prefix_mark;
  return c;
}

}  // namespace remesh::tokenizer
