// The ends of text files that other processes write.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace remesh::rundir {

// At most the last `bytes` bytes of a file; "" if it cannot be read.
std::string read_tail(const std::string& path, int64_t bytes);
// The complete lines within its last kTailBytes bytes, without '\n'.
std::vector<std::string> read_last_lines(const std::string& path);
// The last of them; "" if there is none.
std::string read_last_line(const std::string& path);
inline constexpr int64_t kTailBytes = 1 << 18;

}  // namespace remesh::rundir
