#include "tests/testing/files.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "proto/base/check.h"

namespace remesh::testing {

TempDir::TempDir() : path_("/tmp/remesh-test-XXXXXX") {
  CHECK(mkdtemp(path_.data()) != nullptr);
}

TempDir::~TempDir() {
  if (std::getenv("REMESH_KEEP") != nullptr) return;
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string read_whole(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

void write_whole(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  CHECK(out.good());
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

std::vector<Json> read_json_lines(const std::string& path) {
  const std::string text = read_whole(path);
  std::vector<Json> out;
  size_t at = 0;
  for (size_t end; (end = text.find('\n', at)) != std::string::npos;
       at = end + 1) {
    Json j = Json::parse(text.begin() + static_cast<std::ptrdiff_t>(at),
                         text.begin() + static_cast<std::ptrdiff_t>(end),
                         nullptr, /*allow_exceptions=*/false);
    if (j.is_object()) out.push_back(std::move(j));
  }
  return out;
}

std::string raw_value(const std::string& line, const std::string& key) {
  const std::string start = "\"" + key + "\":";
  const size_t at = line.find(start);
  if (at == std::string::npos) return "";
  const size_t begin = at + start.size();
  return line.substr(begin, line.find_first_of(",}", begin) - begin);
}

std::string tail(const std::string& text, size_t count) {
  const auto lines = split_lines(text);
  std::string out;
  for (size_t i = lines.size() > count ? lines.size() - count : 0;
       i < lines.size(); ++i)
    out += lines[i] + "\n";
  return out;
}

}  // namespace remesh::testing
