// Pure helpers for text that people read.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace remesh {

// The candidate with the smallest edit distance to `word`; "" if every distance
// is greater than max(2, word.size() / 3), or not below word.size().
std::string nearest_name(std::string_view word,
                         const std::vector<std::string>& candidates);

// "a, b, c".
std::string join(const std::vector<std::string>& parts,
                 std::string_view separator = ", ");

// "1.5 GiB".
std::string format_bytes(uint64_t bytes);

// "2h05m", "3m20s", "4.2s".
std::string format_duration(double seconds);

// As strftime() formats that second: of this machine's time zone, or UTC.
std::string time_text(double unix_s, const char* format, bool utc = false);

// "forward for 1.2 s", "forward for 2.5 ms".
std::string lasting(const std::string& what, double seconds);

// "1 slot", "2 slots"; "1 mesh", "2 meshes" with the ending "es".
std::string plural(int64_t n, const std::string& thing,
                   std::string_view ending = "s");

// The name of a value of an enumeration as people read it: "NOT_RUNNING" is
// "not running".
std::string enum_text(std::string_view name);

// As one word of a command line that a person may copy into a shell.
std::string shell_quoted(const std::string& text);

}  // namespace remesh
