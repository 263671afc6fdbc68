#include "worker/tokenizer/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <vector>

namespace remesh::tokenizer {
namespace {

const utf8proc_uint8_t* bytes(std::string_view text) {
  return reinterpret_cast<const utf8proc_uint8_t*>(text.data());
}

bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }
bool continues_char(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) == 0x80;
}

// The property White_Space.
bool is_space(int32_t code) {
  if (code < 0x80) return code == ' ' || (code >= 9 && code <= 13);
  const utf8proc_category_t c = utf8proc_category(code);
  return c == UTF8PROC_CATEGORY_ZS || c == UTF8PROC_CATEGORY_ZL ||
         c == UTF8PROC_CATEGORY_ZP || code == 0x85;
}

// The character of each byte.
constexpr std::array<int32_t, 256> kAlphabet = [] {
  std::array<int32_t, 256> chars{};
  int32_t other = 0x100;
  for (int b = 0; b < 256; ++b) {
    const bool itself =
        (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    chars[static_cast<size_t>(b)] = itself ? b : other++;
  }
  return chars;
}();

// What \w matches.
bool is_word(int32_t code) {
  if (code < 0) return false;
  const utf8proc_category_t c = utf8proc_category(code);
  const auto within = [&](int32_t first, int32_t last) {
    return code >= first && code <= last;
  };
  return (c >= UTF8PROC_CATEGORY_LU && c <= UTF8PROC_CATEGORY_NL) ||
         c == UTF8PROC_CATEGORY_PC || within(0x200C, 0x200D) ||  // joiners
         // Letters in circles and squares.
         within(0x24B6, 0x24E9) || within(0x1F130, 0x1F149) ||
         within(0x1F150, 0x1F169) || within(0x1F170, 0x1F189);
}

// The last character of `text`, like first_char().
Char last_char(std::string_view text) {
  size_t at = text.size() - 1;
  while (at > 0 && text.size() - at < 4 && continues_char(text[at])) --at;
  const Char c = first_char(text.substr(at));
  return at + c.length == text.size() ? c : Char{};
}

void append_char(std::string& text, int32_t code) {
  utf8proc_uint8_t buffer[4];
  const utf8proc_ssize_t n = utf8proc_encode_char(code, buffer);
  text.append(reinterpret_cast<const char*>(buffer), static_cast<size_t>(n));
}

utf8proc_option_t options_of(NormalForm form) {
  const bool composes = form == NormalForm::kC || form == NormalForm::kKC;
  const bool compatible = form == NormalForm::kKC || form == NormalForm::kKD;
  return static_cast<utf8proc_option_t>(
      UTF8PROC_STABLE | (composes ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
      (compatible ? UTF8PROC_COMPAT : 0));
}

// Nothing if it is not UTF-8. utf8proc_map() would take quadratic time for many
// marks after one letter: it swaps neighbors.
std::optional<std::string> normalized_run(std::string_view run,
                                          utf8proc_option_t options) {
  std::vector<utf8proc_int32_t> chars;
  while (!run.empty()) {
    const Char c = first_char(run);
    utf8proc_int32_t parts[32];  // no character has more than 18
    const utf8proc_ssize_t n = utf8proc_decompose_char(
        c.code, parts, std::ssize(parts), options, nullptr);
    if (n < 0 || n > std::ssize(parts)) return std::nullopt;
    chars.insert(chars.end(), parts, parts + n);
    run.remove_prefix(c.length);
  }
  const auto class_of = [](utf8proc_int32_t c) {
    return utf8proc_get_property(c)->combining_class;
  };
  for (auto at = chars.begin(); at != chars.end();) {
    const auto marks = std::find_if(at, chars.end(), class_of);
    at = std::find_if_not(marks, chars.end(), class_of);
    std::stable_sort(marks, at, [&](utf8proc_int32_t a, utf8proc_int32_t b) {
      return class_of(a) < class_of(b);
    });
  }
  const auto size = static_cast<utf8proc_ssize_t>(chars.size());
  chars.push_back(0);  // room for the end of the text
  const utf8proc_ssize_t n = utf8proc_reencode(chars.data(), size, options);
  if (n < 0) return std::nullopt;
  return std::string(reinterpret_cast<const char*>(chars.data()),
                     static_cast<size_t>(n));
}

}  // namespace

Char first_char(std::string_view text) {
  utf8proc_int32_t code = -1;
  const utf8proc_ssize_t n = utf8proc_iterate(
      bytes(text),
      static_cast<utf8proc_ssize_t>(std::min<size_t>(4, text.size())), &code);
  if (n <= 0) return {};
  return {code, static_cast<size_t>(n)};
}

size_t complete_prefix(std::string_view text) {
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
    const auto b = static_cast<unsigned char>(text[text.size() - back]);
    if ((b & 0xC0) == 0x80) continue;
    const size_t length = b < 0xC2 || b > 0xF4 ? 1
                          : b < 0xE0           ? 2
                          : b < 0xF0           ? 3
                                               : 4;
    return length > back ? text.size() - back : text.size();
  }
  return text.size();
}

size_t valid_prefix(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const Char c =
        is_ascii(text[at]) ? Char{0, 1} : first_char(text.substr(at));
    if (c.code < 0) break;
    at += c.length;
  }
  return at;
}

size_t leading_space(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const Char c = first_char(text.substr(at));
    if (!is_space(c.code)) break;
    at += c.length;
  }
  return at;
}

size_t trailing_space(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    const Char c = last_char(text.substr(0, end));
    if (!is_space(c.code)) break;
    end -= c.length;
  }
  return text.size() - end;
}

bool begins_in_word(std::string_view text) {
  return !text.empty() && is_word(first_char(text).code);
}
bool ends_in_word(std::string_view text) {
  return !text.empty() && is_word(last_char(text).code);
}

// ASCII does not change, except that a mark may be composed with the character
// before it.
std::string normalized(std::string_view text, NormalForm form) {
  const utf8proc_option_t options = options_of(form);
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const auto other = std::find_if_not(text.begin(), text.end(), is_ascii);
    const auto end = std::find_if(other, text.end(), is_ascii);
    const bool marked = other != text.end() && other != text.begin();
    const auto plain =
        static_cast<size_t>(other - text.begin()) - (marked ? 1 : 0);
    out.append(text.substr(0, plain));
    text.remove_prefix(plain);
    const std::string_view run = text.substr(0, end - text.begin());
    const std::optional<std::string> normal = normalized_run(run, options);
    out.append(normal ? std::string_view(*normal) : run);
    text.remove_prefix(run.size());
  }
  return out;
}

std::string lowercase(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Char c = first_char(text);
    if (c.code < 0)
      out += text[0];
    else if (c.code == 0x130)  // the only one that becomes two
      out += "i\u0307";
    else
      append_char(out, utf8proc_tolower(c.code));
    text.remove_prefix(c.length);
  }
  return out;
}

std::string to_alphabet(std::string_view bytes) {
  std::string text;
  for (const char b : bytes)
    append_char(text, kAlphabet[static_cast<unsigned char>(b)]);
  return text;
}

std::string from_alphabet(std::string_view text) {
  std::string bytes;
  while (!text.empty()) {
    const Char c = first_char(text);
    const auto* at = std::find(kAlphabet.begin(), kAlphabet.end(), c.code);
    if (at == kAlphabet.end()) return "";
    bytes.push_back(static_cast<char>(at - kAlphabet.begin()));
    text.remove_prefix(c.length);
  }
  return bytes;
}

}  // namespace remesh::tokenizer
