#include "worker/tokenizer/pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "proto/base/number.h"

namespace remesh::tokenizer {

// Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
const char kGpt2Pattern[] =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
const char kLlama3Pattern[] =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
    R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

namespace {

// Positions stay within 31 bits, where every space becomes a mark, too.
constexpr size_t kMaxText = size_t{1} << 29;
// A piece never continues before a space, if no token does.
constexpr char kBeforeMarks[] = "\u2581*[^\u2581]+|\u2581+";

class PipelineTokenizer final : public Tokenizer {
 public:
  explicit PipelineTokenizer(Pipeline p) : p_(std::move(p)) {
    for (const auto& [text, token] : p_.added.tokens())
      given_ids_.insert(token.id);
    for (const auto& [text, token] : p_.normalized_added.tokens())
      normalized_ids_.insert(token.id);
  }

  std::string id() const override { return p_.id; }
  int64_t vocab_size() const override {
    return static_cast<int64_t>(p_.decoded.size());
  }
  int32_t end_of_text() const override { return p_.end_of_text; }
  bool adds_space() const override { return p_.adds_space; }
  std::string changes() const override { return p_.changes; }
  bool is_added(int32_t token) const override {
    return given_ids_.contains(token) || normalized_ids_.contains(token);
  }
  bool restarts_after(int32_t token) const override {
    return given_ids_.contains(token) ||
           (p_.restarts && normalized_ids_.contains(token));
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
    return p_.added.divide(
        text, options.special, out,
        [&](std::string_view part, bool after, bool before) {
          const TextEdges edges{
              .begins = after || !options.continues || options.after_added,
              .ends = before || !options.continued};
          return encode_between(part, edges, after, options, scratch, out);
        });
  }

 private:
  struct Scratch {
    Matcher matcher;
    Bpe::Scratch bpe;
  };

  // `after_added`: an added token is in front of the text.
  Status encode_between(std::string_view text, TextEdges edges,
                        bool after_added, const EncodeOptions& options,
                        Scratch& scratch, std::vector<int32_t>& out) const {
    std::string normal;
    RETURN_IF_ERROR(
        apply_steps(p_.normalizer, edges, scratch.matcher, &text, &normal));
    return p_.normalized_added.divide(
        text, options.special, out,
        [&](std::string_view part, bool after, bool /*before*/) -> Status {
          std::string prefixed;
          RETURN_IF_ERROR(apply_steps(
              p_.prefix, {.begins = begins(after_added || after, options)},
              scratch.matcher, &part, &prefixed));
          return encode_pieces(part, 0, scratch, out);
        });
  }

  // Whether a text begins there for the steps of `prefix`.
  bool begins(bool after_added, const EncodeOptions& options) const {
    return after_added || (options.continues && options.after_added)
               ? p_.restarts
               : !options.continues;
  }

  Status encode_pieces(std::string_view text, size_t split, Scratch& scratch,
                       std::vector<int32_t>& out) const {
    if (text.empty()) return ok_status();
    if (split == p_.splits.size()) return p_.bpe.encode(text, scratch.bpe, out);
    const Split& divides = p_.splits[split];
    size_t at = 0;
    const auto piece = [&](size_t end) {
      const std::string_view part = text.substr(at, end - at);
      at = end;
      return encode_pieces(part, split + 1, scratch, out);
    };
    RETURN_IF_ERROR(divides.regex.for_each_match(
        text, scratch.matcher, [&](size_t begin, size_t end) -> Status {
          RETURN_IF_ERROR(piece(begin));
          if (!divides.removes) return piece(end);
          at = end;
          return ok_status();
        }));
    return piece(text.size());
  }

  Pipeline p_;
  std::set<int32_t> given_ids_, normalized_ids_;  // of added tokens
};

}  // namespace

Status divide_before_marks(const BpeModel& bpe, Pipeline* pipeline) {
  // Marks without a token may be joined to unknown characters around them.
  if (bpe.ignore_merges || (bpe.unknown >= 0 && bpe.fuse_unknown &&
                            std::find(bpe.tokens.begin(), bpe.tokens.end(),
                                      kSpaceMark) == bpe.tokens.end()))
    return ok_status();
  for (const BpeModel::Merge& m : bpe.merges) {
    std::string_view token = bpe.tokens[static_cast<size_t>(m.result)];
    while (token.starts_with(kSpaceMark))
      token.remove_prefix(std::string_view(kSpaceMark).size());
    if (token.find(kSpaceMark) != std::string_view::npos) return ok_status();
  }
  ASSIGN_OR_RETURN(Regex regex, Regex::compile(kBeforeMarks));
  pipeline->splits.push_back({std::move(regex)});
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
