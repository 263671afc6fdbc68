#include "worker/tokenizer/pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <bitset>
#include <set>
#include <utility>

#include "proto/base/number.h"
#include "worker/tokenizer/unicode.h"

namespace remesh::tokenizer {

// Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
const char kGpt2Pattern[] =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
const char kLlama3Pattern[] =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
    R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

namespace {

// Keeps positions within 31 bits, whatever a step adds to a text.
constexpr size_t kMaxText = size_t{1} << 29;
// A piece never continues before a space, if no token does.
constexpr char kBeforeMarks[] = "\u2581*[^\u2581]+|\u2581+";

class PipelineTokenizer final : public Tokenizer {
 public:
  explicit PipelineTokenizer(Pipeline p) : p_(std::move(p)) {
    for (const auto& [text, token] : p_.added) {
      first_bytes_.set(static_cast<unsigned char>(text.at(0)));
      added_ids_.insert(token.id);
    }
  }

  std::string id() const override { return p_.id; }
  int64_t vocab_size() const override {
    return static_cast<int64_t>(p_.decoded.size());
  }
  int32_t end_of_text() const override { return p_.end_of_text; }
  bool adds_space() const override {
    return p_.prefix != Pipeline::Prefix::kNone;
  }
  bool is_added(int32_t token) const override {
    return added_ids_.contains(token);
  }

  Result<std::string_view> token_bytes(int32_t token) const override {
    if (token < 0 || token >= vocab_size())
      return invalid_argument(
          fmt::format("token {}: the tokenizer has tokens 0 to {}", token,
                      vocab_size() - 1));
    return std::string_view(p_.decoded[static_cast<size_t>(token)]);
  }

  Status encode(std::string_view text, const EncodeOptions& options,
                std::vector<int32_t>& out) const override {
    if (text.size() > kMaxText)
      return invalid_argument(fmt::format(
          "text of {} bytes: at most {} at once", text.size(), kMaxText));
    Scratch scratch{.bpe = Bpe::Scratch(text.size())};
    if (p_.added_have_marks && options.special)
      return encode_between_special(text, options, scratch, out);
    std::string marked;
    if (p_.added_have_marks)
      text = marked = mark_spaces(text, options.continues, !options.continues);
    return encode_between_added(text, options, options.special, scratch, out);
  }

 private:
  struct Scratch {
    Matcher matcher;
    Bpe::Scratch bpe;
  };

  // Whether a mark is added before a text between added tokens.
  bool begins(bool first, const EncodeOptions& options) const {
    const bool after_token = p_.prefix == Pipeline::Prefix::kText;
    if (!first) return after_token;
    return !options.continues || (options.after_added && after_token);
  }

  // Special tokens have no marks in their texts: they are found before spaces
  // are marked, and what is between them is marked like texts of their own.
  Status encode_between_special(std::string_view text,
                                const EncodeOptions& options, Scratch& scratch,
                                std::vector<int32_t>& out) const {
    bool continues = options.continues && !options.after_added;
    size_t begin = 0;
    const auto part = [&](size_t end) {
      if (begin == end) return ok_status();
      const std::string marked =
          mark_spaces(text.substr(begin, end - begin), continues, !continues);
      return encode_between_added(marked, options, /*special=*/false, scratch,
                                  out);
    };
    for (size_t at = 0; at < text.size();) {
      const auto* found = first_bytes_[static_cast<unsigned char>(text[at])]
                              ? added_at(text.substr(at), /*special=*/true)
                              : nullptr;
      if (found == nullptr || !found->second.special) {
        ++at;
        continue;
      }
      RETURN_IF_ERROR(part(at));
      out.push_back(found->second.id);
      begin = at += found->first.size();
      continues = false;
    }
    return part(text.size());
  }

  Status encode_between_added(std::string_view text,
                              const EncodeOptions& options, bool special,
                              Scratch& scratch,
                              std::vector<int32_t>& out) const {
    bool first = true;
    size_t begin = 0;  // of the text after the last token
    for (size_t at = 0; at < text.size();) {
      const auto* found = first_bytes_[static_cast<unsigned char>(text[at])]
                              ? added_at(text.substr(at), special)
                              : nullptr;
      if (found == nullptr) {
        ++at;
        continue;
      }
      const AddedToken& token = found->second;
      std::string_view before = text.substr(begin, at - begin);
      if (token.strip_left) before.remove_suffix(trailing_space(before));
      RETURN_IF_ERROR(encode_between(before, first, options, scratch, out));
      out.push_back(token.id);
      first = false;
      at += found->first.size();
      if (token.strip_right) at += leading_space(text.substr(at));
      begin = at;
    }
    return encode_between(text.substr(begin), first, options, scratch, out);
  }

  // The longest added token that the text begins with, or null. Every token
  // that is a prefix of the text is one of the last token before the text, too.
  const AddedTokens::value_type* added_at(std::string_view text,
                                          bool special) const {
    while (!text.empty()) {
      auto it = p_.added.upper_bound(text);
      if (it == p_.added.begin()) return nullptr;
      --it;
      const size_t common =
          static_cast<size_t>(std::mismatch(text.begin(), text.end(),
                                            it->first.begin(), it->first.end())
                                  .first -
                              text.begin());
      if (common == it->first.size() && (special || !it->second.special))
        return &*it;
      text = text.substr(0, std::min(common, text.size() - 1));
    }
    return nullptr;
  }

  Status encode_between(std::string_view text, bool first,
                        const EncodeOptions& options, Scratch& scratch,
                        std::vector<int32_t>& out) const {
    if (text.empty()) return ok_status();
    std::string normal;
    if (p_.nfc) text = normal = to_nfc(text);
    std::string marked;
    if (p_.marks_spaces && !p_.added_have_marks)
      text = marked =
          mark_spaces(text, /*continues=*/true, begins(first, options));
    return encode_pieces(text, 0, scratch, out);
  }

  // The text with marks for spaces, and one before it if `begins`. continues:
  // the text is not the beginning of a document.
  std::string mark_spaces(std::string_view text, bool continues,
                          bool begins) const {
    const std::string_view mark = kSpaceMark;
    std::string out;
    out.reserve(text.size() + text.size() / 2);
    bool after_space = !continues;
    for (const char c : text) {
      if (p_.removes_spaces && after_space && c == ' ') continue;
      after_space = c == ' ';
      if (c == ' ')
        out += mark;
      else
        out += c;
    }
    while (p_.removes_spaces && out.ends_with(mark))
      out.resize(out.size() - mark.size());
    if (begins && p_.prefix != Pipeline::Prefix::kNone && !out.empty())
      out.insert(0, mark);
    return out;
  }

  Status encode_pieces(std::string_view text, size_t split, Scratch& scratch,
                       std::vector<int32_t>& out) const {
    if (text.empty()) return ok_status();
    if (split == p_.splits.size()) return p_.bpe.encode(text, scratch.bpe, out);
    size_t at = 0;
    const auto piece = [&](size_t end) {
      const std::string_view part = text.substr(at, end - at);
      at = end;
      return encode_pieces(part, split + 1, scratch, out);
    };
    RETURN_IF_ERROR(p_.splits[split].for_each_match(
        text, scratch.matcher, [&](size_t begin, size_t end) {
          Status status = piece(begin);
          return status.ok() ? piece(end) : status;
        }));
    return piece(text.size());
  }

  Pipeline p_;
  std::bitset<256> first_bytes_;  // of added tokens
  std::set<int32_t> added_ids_;
};

}  // namespace

Status divide_before_marks(const BpeModel& bpe, Pipeline* pipeline) {
  if (bpe.ignore_merges) return ok_status();
  for (const BpeModel::Merge& m : bpe.merges) {
    std::string_view token = bpe.tokens[static_cast<size_t>(m.result)];
    while (token.starts_with(kSpaceMark))
      token.remove_prefix(std::string_view(kSpaceMark).size());
    if (token.find(kSpaceMark) != std::string_view::npos) return ok_status();
  }
  ASSIGN_OR_RETURN(Regex regex, Regex::compile(kBeforeMarks));
  pipeline->splits.push_back(std::move(regex));
  return ok_status();
}

std::optional<char> byte_of(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x")) return std::nullopt;
  return parse_number<unsigned char>(token.substr(3, 2), 16);
}

std::string unmark_spaces(std::string text) {
  const size_t size = std::string_view(kSpaceMark).size();
  for (size_t at = text.find(kSpaceMark); at != std::string::npos;
       at = text.find(kSpaceMark, at + 1))
    text.replace(at, size, " ");
  return text;
}

std::unique_ptr<Tokenizer> make_tokenizer(Pipeline pipeline) {
  CHECK(pipeline.end_of_text >= 0 &&
        static_cast<size_t>(pipeline.end_of_text) < pipeline.decoded.size());
  return std::make_unique<PipelineTokenizer>(std::move(pipeline));
}

}  // namespace remesh::tokenizer
