// UTF-8 and the properties of characters, by utf8proc, and the byte-level
// alphabet of GPT-2.
//
// Pure functions. utf8proc 2.8 implements Unicode 15.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace remesh::tokenizer {

// The first character of `text` and its length; a byte that does not begin a
// character is one of length 1, with a negative code.
struct Char {
  int32_t code = -1;
  size_t length = 1;
};
// REQUIRES: text is not empty.
Char first_char(std::string_view text);

// Length of `text` without an incomplete character at its end.
size_t complete_prefix(std::string_view text);
// Length of the UTF-8 that `text` begins with (Unicode 15, table 3-7: no
// overlong forms, surrogates, or code points above U+10FFFF).
size_t valid_prefix(std::string_view text);
// Length of the white space that `text` begins or ends with.
size_t leading_space(std::string_view text);
size_t trailing_space(std::string_view text);

// Whether `text` begins or ends with a character of a word, as \w of regular
// expressions matches one: a letter, a mark, a decimal digit, an underscore.
bool begins_in_word(std::string_view text);
bool ends_in_word(std::string_view text);

// The normalization forms of Unicode (Standard Annex 15). Characters beside
// bytes that are not UTF-8 stay as they are.
enum class NormalForm { kC, kD, kKC, kKD };
std::string normalized(std::string_view text, NormalForm form);
// Every character by itself in lower case, whatever is beside it.
std::string lowercase(std::string_view text);

// The alphabet has one printable character for each byte, so that a vocabulary
// of bytes can be written as text. Bytes 33 to 126, 161 to 172 and 174 to 255
// are the character of the same number; the 68 others are U+0100 to U+0143 in
// order.
std::string to_alphabet(std::string_view bytes);
// The bytes of a text; "" if it has other characters.
std::string from_alphabet(std::string_view text);

}  // namespace remesh::tokenizer
