#include "proto/rundir/file_tail.h"

#include <algorithm>
#include <fstream>

namespace remesh::rundir {

std::string read_tail(const std::string& path, int64_t bytes) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  const int64_t end = in.tellg(), begin = std::max<int64_t>(0, end - bytes);
  if (end <= 0) return "";
  in.seekg(begin);
  std::string text(static_cast<size_t>(end - begin), '\0');
  in.read(text.data(), end - begin);
  text.resize(static_cast<size_t>(in.gcount()));
  return text;
}

std::vector<std::string> read_last_lines(const std::string& path) {
  std::string text = read_tail(path, kTailBytes + 1);
  // The beginning of the first line may be missing.
  if (text.size() > kTailBytes) text.erase(0, text.find('\n') + 1);
  std::vector<std::string> lines;
  size_t begin = 0;
  for (size_t end; (end = text.find('\n', begin)) != std::string::npos;
       begin = end + 1)
    lines.push_back(text.substr(begin, end - begin));
  return lines;
}

std::string read_last_line(const std::string& path) {
  const std::vector<std::string> lines = read_last_lines(path);
  return lines.empty() ? "" : lines.back();
}

}  // namespace remesh::rundir
