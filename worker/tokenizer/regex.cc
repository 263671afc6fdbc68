#include "worker/tokenizer/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <utility>

#include "worker/tokenizer/unicode.h"

namespace remesh::tokenizer {
namespace {

// A tokenizer's pattern takes a few steps per character.
constexpr uint32_t kMaxSteps = 20'000'000;
constexpr uint32_t kMaxHeapKib = 64 << 10;
constexpr size_t kMaxPattern = 64 << 10;

std::string message_of(int error) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(error, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

// A repeat such as {2,3}, at its brace: its length; 0: it is none.
size_t repeat_length(std::string_view p) {
  const size_t end = p.find_first_not_of("0123456789,", 1);
  return end != std::string_view::npos && p[end] == '}' && end > 1 ? end + 1
                                                                   : 0;
}

// What the pattern has that Oniguruma reads differently; "" if nothing.
std::string foreign_syntax(const std::string& p) {
  constexpr std::string_view kEscapes = "hHKCGQNwWbB";
  bool in_set = false;
  for (size_t i = 0; i < p.size(); ++i) {
    std::string two = p.substr(i, 2);
    if (in_set && (two == "&&" || p[i] == '[')) return two;
    if (p[i] == '\\') {
      if (two.size() == 2 && kEscapes.find(two[1]) != std::string_view::npos)
        return two;
      ++i;
    } else if (in_set) {
      in_set = p[i] != ']';
    } else if (p[i] == '[') {
      in_set = true;
      if (p.compare(i + 1, 1, "^") == 0) ++i;
      if (p.compare(i + 1, 1, "]") == 0) ++i;
    } else if (p[i] == '{') {
      const size_t n = repeat_length(std::string_view(p).substr(i));
      if (n > 0 && (p[i + 1] == ',' || p.compare(i + n, 1, "+") == 0))
        return p.substr(i, n + 1);
    } else if (two == "(?") {
      // Of options, i and x mean the same.
      const size_t end = p.find_first_of(":)", i);
      const size_t other = p.find_first_of("ms", i);
      if (other < end && p.find_first_not_of("imsx-", i + 2) == end)
        return p.substr(i, end - i + 1);
    }
  }
  return "";
}

}  // namespace

struct Regex::Code {
  ~Code() { pcre2_code_free(code); }
  std::string pattern;
  pcre2_code* code = nullptr;
  bool utf = false;
};

Result<Regex> Regex::compile(const std::string& pattern) {
  const std::string foreign = foreign_syntax(pattern);
  if (!foreign.empty())
    return invalid_argument(
        fmt::format("pattern '{}': '{}' is not supported", pattern, foreign));
  return compile_with(pattern, PCRE2_MULTILINE | PCRE2_UCP | PCRE2_UTF);
}

Result<Regex> Regex::compile_for_bytes(const std::string& pattern) {
  return compile_with(pattern, 0);
}

Result<Regex> Regex::compile_with(const std::string& pattern,
                                  unsigned options) {
  if (pattern.size() > kMaxPattern)
    return invalid_argument(fmt::format("pattern of {} bytes: at most {}",
                                        pattern.size(), kMaxPattern));
  int error = 0;
  size_t offset = 0;
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  auto code = std::make_shared<Code>();
  code->pattern = pattern;
  code->utf = (options & PCRE2_UTF) != 0;
  code->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()),
                             pattern.size(), options, &error, &offset, context);
  pcre2_compile_context_free(context);
  if (code->code == nullptr)
    return invalid_argument(fmt::format("pattern '{}': {} at offset {}",
                                        pattern, message_of(error), offset));
  // Without it, or for a pattern that it does not support, matching is slower.
  (void)pcre2_jit_compile(code->code, PCRE2_JIT_COMPLETE);
  return Regex(std::move(code));
}

Matcher::Matcher()
    : data_(pcre2_match_data_create(1, nullptr)),
      context_(pcre2_match_context_create(nullptr)) {
  auto* context = static_cast<pcre2_match_context*>(context_);
  pcre2_set_match_limit(context, kMaxSteps);
  pcre2_set_heap_limit(context, kMaxHeapKib);
}

Matcher::~Matcher() {
  pcre2_match_context_free(static_cast<pcre2_match_context*>(context_));
  pcre2_match_data_free(static_cast<pcre2_match_data*>(data_));
}

bool Regex::may_match_nothing() const {
  uint32_t may = 0;
  (void)pcre2_pattern_info(code_->code, PCRE2_INFO_MATCHEMPTY, &may);
  return may != 0;
}

size_t Regex::matchable_prefix(std::string_view text) const {
  return code_->utf ? valid_prefix(text) : text.size();
}

// PCRE2 itself would check all of the rest of the text before each match.
Result<bool> Regex::next(std::string_view text, Matcher& matcher, size_t* begin,
                         size_t* end) const {
  auto* data = static_cast<pcre2_match_data*>(matcher.data_);
  const int rc =
      pcre2_match(code_->code, reinterpret_cast<PCRE2_SPTR>(text.data()),
                  text.size(), *end, PCRE2_NOTEMPTY | PCRE2_NO_UTF_CHECK, data,
                  static_cast<pcre2_match_context*>(matcher.context_));
  if (rc == PCRE2_ERROR_NOMATCH) return false;
  if (rc < 0)
    return invalid_argument(
        fmt::format("pattern '{}': {}", code_->pattern, message_of(rc)));
  const size_t* found = pcre2_get_ovector_pointer(data);
  *begin = found[0];
  *end = found[1];
  return true;
}

}  // namespace remesh::tokenizer
