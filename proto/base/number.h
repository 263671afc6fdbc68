// parse_number: a number that is all of a text.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace remesh {

// As std::from_chars() reads it: without spaces and without a '+'. Nothing if
// the text is anything else, or no T can hold the number.
template <typename T, typename... Base>
std::optional<T> parse_number(std::string_view text, Base... base) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value, base...);
  if (error != std::errc() || at != end) return std::nullopt;
  return value;
}

}  // namespace remesh
