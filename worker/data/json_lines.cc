#include "worker/data/json_lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "proto/base/json_depth.h"

namespace remesh::data {
namespace {

constexpr size_t kMostLine = size_t{256} << 20;
constexpr size_t kPortion = size_t{1} << 20;

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

// What is wrong, "invalid literal", of a message like
// "[json.exception.parse_error.101] parse error at line 1, column 9: syntax
// error while parsing value - invalid literal; last read: ...".
std::string reason_of(std::string_view message) {
  constexpr size_t kMost = 200;
  for (const std::string_view before : {"] ", " - "})
    if (const size_t at = message.find(before); at != std::string_view::npos)
      message.remove_prefix(at + before.size());
  return std::string(
      message.substr(0, std::min(message.find("; last read"), kMost)));
}

class FieldReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit FieldReader(const std::string& field) : field_(field) {}

  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(number_integer_t) override { return value(); }
  bool number_unsigned(number_unsigned_t) override { return value(); }
  bool number_float(number_float_t, const string_t&) override {
    return value();
  }
  bool binary(binary_t&) override { return value(); }
  bool string(string_t& text) override {
    value();
    if (wanted()) found.text = std::move(text);
    return true;
  }
  bool key(string_t& name) override {
    if (depth_ == 1) is_field_ = name == field_;
    return true;
  }
  bool start_object(std::size_t) override {
    value();
    found.in_object = found.in_object || depth_ == 0;
    ++depth_;
    return true;
  }
  bool start_array(std::size_t) override {
    value();
    found.is_list = found.is_list || wanted();
    ++depth_;
    return true;
  }
  bool end_object() override { return --depth_, true; }
  bool end_array() override { return --depth_, true; }
  bool parse_error(std::size_t, const std::string&,
                   const nlohmann::json::exception& e) override {
    found = {.why_not = reason_of(e.what())};
    return false;
  }

  LineField found;

 private:
  bool wanted() const { return depth_ == 1 && is_field_; }
  // Of a field that is there twice the last value counts.
  bool value() {
    if (wanted()) found.text.reset();
    if (wanted()) found.is_list = false;
    return true;
  }

  const std::string& field_;
  int depth_ = 0;
  bool is_field_ = false;  // the value that follows, at depth 1
};

}  // namespace

LineField read_field(std::string_view line, const std::string& field) {
  FieldReader reader(field);
  nlohmann::json::sax_parse(line, &reader);
  return std::move(reader.found);
}

bool is_json_lines(const std::string& path) {
  const std::string name = without_compression(path);
  return name.ends_with(".jsonl") || name.ends_with(".ndjson") ||
         name.ends_with(".json");
}

Status for_each_line(TextReader& reader, const LineSink& take,
                     const std::function<void(uint64_t)>& progress) {
  std::vector<char> portion(kPortion);
  std::string line;
  int64_t number = 0;
  uint64_t reported = 0;
  const auto place = [&] {
    return fmt::format("{}:{}", reader.path(), number);
  };
  const auto end_line = [&]() -> Status {
    ++number;
    if (!is_blank(line)) RETURN_IF_ERROR(take(line, place()));
    line.clear();
    return ok_status();
  };
  for (;;) {
    ASSIGN_OR_RETURN(const size_t got, reader.read(portion));
    progress(reader.bytes_done() - reported);
    reported = reader.bytes_done();
    if (got == 0) break;
    for (std::string_view left(portion.data(), got); !left.empty();) {
      const size_t end = left.find('\n');
      line += left.substr(0, end);
      if (line.size() > kMostLine)
        return corrupt(fmt::format("{}:{}: a line of over {} bytes",
                                   reader.path(), number + 1, kMostLine));
      if (end == std::string_view::npos) break;
      left.remove_prefix(end + 1);
      RETURN_IF_ERROR(end_line());
    }
  }
  return end_line();
}

Result<std::string> text_field(std::string_view line, const std::string& field,
                               const std::string& place) {
  if (json_is_deeper(line, kMaxJsonDepth))
    return corrupt(
        fmt::format("{}: nested more than {} deep", place, kMaxJsonDepth));
  LineField found = read_field(line, field);
  if (!found.in_object)
    return corrupt(
        place + ": is no JSON object of UTF-8 text" +
        (found.why_not.empty() ? "" : " (" + found.why_not + ")") +
        "; JSON is read one object a line, as jq -c . or, of a list, jq -c "
        "'.[]' prints it");
  if (!found.text)
    return corrupt(
        fmt::format("{}: has no text in field \"{}\" (--field)", place, field));
  return *std::move(found.text);
}

Result<uint64_t> split_documents(
    TextReader& reader, const std::string& field, BlockSplitter& splitter,
    const std::function<void(uint64_t)>& progress) {
  if (!is_json_lines(reader.path()))
    return split_text(reader, /*raw_bytes=*/false, splitter, progress);
  uint64_t bytes = 0;
  RETURN_IF_ERROR(for_each_line(
      reader,
      [&](std::string_view line, const std::string& place) -> Status {
        ASSIGN_OR_RETURN(const std::string text,
                         text_field(line, field, place));
        bytes += text.size();
        RETURN_IF_ERROR(splitter.feed(text, /*separators=*/false));
        return splitter.end_file();
      },
      progress));
  return bytes;
}

}  // namespace remesh::data
