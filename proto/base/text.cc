#include "proto/base/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <numeric>

namespace remesh {
namespace {

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1,
                         diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest_name(std::string_view word,
                         const std::vector<std::string>& candidates) {
  // At least one character stays.
  size_t best = std::min(word.size(), std::max<size_t>(2, word.size() / 3) + 1);
  std::string result;
  for (const std::string& c : candidates) {
    const size_t d = edit_distance(word, c);
    if (d < best) {
      best = d;
      result = c;
    }
  }
  return result;
}

std::string join(const std::vector<std::string>& parts,
                 std::string_view separator) {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) out += separator;
    out += parts[i];
  }
  return out;
}

std::string format_bytes(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes)
                   : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string time_text(double unix_s, const char* format, bool utc) {
  const auto seconds = static_cast<time_t>(std::floor(unix_s));
  tm parts{};
  (utc ? gmtime_r : localtime_r)(&seconds, &parts);
  char text[64];
  return {text, strftime(text, sizeof(text), format, &parts)};
}

std::string format_duration(double seconds) {
  if (seconds < 60) return fmt::format("{:.1f}s", std::max(0.0, seconds));
  const auto s = std::llround(seconds);
  if (s < 3600) return fmt::format("{}m{:02}s", s / 60, s % 60);
  return fmt::format("{}h{:02}m", s / 3600, s % 3600 / 60);
}

std::string lasting(const std::string& what, double seconds) {
  return seconds < 0.0995 ? fmt::format("{} for {:.1f} ms", what, seconds * 1e3)
                          : fmt::format("{} for {:.1f} s", what, seconds);
}

std::string plural(int64_t n, const std::string& thing,
                   std::string_view ending) {
  return fmt::format("{} {}{}", n, thing, n == 1 ? "" : ending);
}

std::string enum_text(std::string_view name) {
  std::string out(name);
  for (char& c : out)
    c = c == '_'
            ? ' '
            : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

std::string shell_quoted(const std::string& text) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
      "-_./:,=@%+";
  if (!text.empty() && text.find_first_not_of(kPlain) == std::string::npos)
    return text;
  std::string out = "'";
  for (const char c : text)
    if (c == '\'')
      out += "'\\''";
    else
      out += c;
  return out + "'";
}

}  // namespace remesh
