// Files of tests: temporary folders and the .jsonl files of a run.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/temp_dir.h"

namespace remesh::testing {

using Json = nlohmann::json;

using remesh::read_whole;
using remesh::TempDir;

void write_whole(const std::string& path, const std::string& text);

// A .jsonl file that grows: each call reads only what was added.
class JsonLines {
 public:
  explicit JsonLines(std::string path) : path_(std::move(path)) {}
  // The complete lines so far. The reference is valid until the next call.
  // Aborts the test program if one is not a JSON object.
  const std::vector<Json>& read();

 private:
  std::string path_;
  size_t at_ = 0;
  std::vector<Json> lines_;
};
// The text of `key`'s value in a line of JSON, as written.
std::string raw_value(const std::string& line, const std::string& key);
std::vector<std::string> split_lines(const std::string& text);
// The last `count` lines.
std::string tail(const std::string& text, size_t count);

}  // namespace remesh::testing
