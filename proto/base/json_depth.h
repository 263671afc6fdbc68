// Parsers of JSON keep every open bracket, and what writes or destroys nested
// values recurses: a few hundred kilobytes of brackets overflow the stack.
#pragma once

#include <string_view>

namespace remesh {

// Whether brackets outside of the strings of a JSON text are nested more than
// `most` deep.
inline bool json_is_deeper(std::string_view text, int most) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\') ++i;
    if (c == '"') in_string = !in_string;
    if (in_string) continue;
    if (c == '[' || c == '{') ++depth;
    if (c == ']' || c == '}') --depth;
    if (depth > most) return true;
  }
  return false;
}

}  // namespace remesh
