// JSON lines: a file with one JSON object a line.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "proto/base/status.h"
#include "worker/data/text_reader.h"

namespace remesh::data {

// How deep values of a line may be nested: tools have schemas in schemas.
inline constexpr int kMaxJsonDepth = 256;

// Whether a file is one by its name: .jsonl, .ndjson or .json, also compressed.
bool is_json_lines(const std::string& path);

// Gives each line that is not blank to `take`, with its place, "FILE:LINE", for
// messages. `progress` gets the bytes of the file
// that were read since it was called last. Fails on a line of over 256 MiB.
using LineSink =
    std::function<Status(std::string_view line, const std::string& place)>;
Status for_each_line(TextReader& reader, const LineSink& take,
                     const std::function<void(uint64_t)>& progress);

// What a line has in a field of the object that it is. A value of any other
// kind is passed over without being kept, so that reading takes no more memory
// than a few times the line.
struct LineField {
  bool in_object = false;           // the line is a JSON object of UTF-8
  std::string why_not;              // "invalid literal"; "": it is other JSON
  std::optional<std::string> text;  // the value, if it is a text
  bool is_list = false;
};
// REQUIRES: the line is nested at most kMaxJsonDepth deep.
LineField read_field(std::string_view line, const std::string& field);

// The text in field `field` of a line. Corrupt, naming `place` and what is
// wrong, if it is no JSON object of UTF-8 with such a field, or is nested more
// than kMaxJsonDepth deep.
Result<std::string> text_field(std::string_view line, const std::string& field,
                               const std::string& place);

// split_text(), or of JSON lines the same with the text of each as a document.
Result<uint64_t> split_documents(TextReader& reader, const std::string& field,
                                 BlockSplitter& splitter,
                                 const std::function<void(uint64_t)>& progress);

}  // namespace remesh::data
