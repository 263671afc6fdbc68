#include "tests/testing/files.h"

#include <fstream>
#include <sstream>

#include "proto/base/check.h"

namespace remesh::testing {

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

namespace {

// Appends the objects of the complete lines in `text`; returns their length.
// Aborts the test program if a line is none.
size_t parse_lines(const std::string& text, std::vector<Json>* out) {
  size_t at = 0;
  for (size_t end; (end = text.find('\n', at)) != std::string::npos;
       at = end + 1) {
    Json j = Json::parse(text.begin() + static_cast<std::ptrdiff_t>(at),
                         text.begin() + static_cast<std::ptrdiff_t>(end),
                         nullptr, /*allow_exceptions=*/false);
    CHECK_MSG(j.is_object(),
              ("not a JSON object: " + text.substr(at, end - at)).c_str());
    out->push_back(std::move(j));
  }
  return at;
}

}  // namespace

const std::vector<Json>& JsonLines::read() {
  std::ifstream in(path_, std::ios::binary | std::ios::ate);
  if (!in) return lines_;
  const auto size = static_cast<size_t>(in.tellg());
  if (size < at_) {  // another file, or it was truncated
    at_ = 0;
    lines_.clear();
  }
  if (size == at_) return lines_;
  std::string text(size - at_, '\0');
  in.seekg(static_cast<std::streamoff>(at_));
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(in.gcount()));
  at_ += parse_lines(text, &lines_);
  return lines_;
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
