#include "worker/data/json_lines.h"

#include "tests/testing/allocations.h"
#include "tests/testing/expect.h"
#include "tests/unit/data/data_test_util.h"
#include "worker/data/inputs.h"

namespace remesh::data {
namespace {

TEST(JsonLines, LinesComeWithTheirPlaces) {
  const TempDir dir;
  EXPECT_TRUE(is_json_lines("a.jsonl"));
  EXPECT_TRUE(is_json_lines("a.ndjson.zst"));
  EXPECT_TRUE(is_json_lines("a.json.gz"));
  EXPECT_FALSE(is_json_lines("jsonl.txt"));
  const std::string path = dir.write("a.jsonl", "one\n\n \r\ntwo\r\nthree");
  auto reader = TextReader::open(path).value();
  std::vector<std::string> got;
  const Status read = for_each_line(
      reader,
      [&](std::string_view line, const std::string& place) {
        got.push_back(place.substr(path.size()) + " " + std::string(line));
        return ok_status();
      },
      [](uint64_t) {});
  ASSERT_OK(read);
  EXPECT_EQ(got, (std::vector<std::string>{":1 one", ":4 two\r", ":5 three"}));
}

TEST(JsonLines, AByteOrderMarkIsNoPartOfTheFirstLine) {
  const TempDir dir;
  auto reader =
      TextReader::open(dir.write("a.jsonl", "\uFEFF{}\n\uFEFF")).value();
  std::vector<std::string> got;
  ASSERT_OK(for_each_line(
      reader,
      [&](std::string_view line, const std::string&) {
        got.emplace_back(line);
        return ok_status();
      },
      [](uint64_t) {}));
  EXPECT_EQ(got, (std::vector<std::string>{"{}", "\uFEFF"}));
}

TEST(JsonLines, AFieldThatIsNoTextIsNamed) {
  EXPECT_EQ(text_field(R"({"text": "a\u00e9\n"})", "text", "f:1").value(),
            "a\u00e9\n");
  const auto why = [](const char* line) {
    const auto text = text_field(line, "body", "f:1");
    EXPECT_EQ(text.status().code(), Code::kCorrupt) << line;
    return text.status().message();
  };
  const std::string none = "f:1: is no JSON object of UTF-8 text";
  EXPECT_TRUE(why("[1]").starts_with(none + "; JSON is read")) << why("[1]");
  for (const auto& [line, reason] :
       {std::pair{"{", "unexpected end of input"},
        {"{\"body\": \"\xff\"}", "invalid string: ill-formed UTF-8 byte"},
        {R"({"body": "\ud83d!"})",
         "invalid string: surrogate U+D800..U+DBFF must be followed"},
        {R"({"body": "a", "n": 1e999})", "number overflow parsing '1e999'"}})
    EXPECT_TRUE(why(line).starts_with(none + " (" + reason)) << why(line);
  EXPECT_EQ(why(R"({"text": "a"})"),
            "f:1: has no text in field \"body\" (--field)");
  for (const char* line :
       {R"({"body": 1})", R"({"n": {"body": "a"}})", R"({"body": ["a"]})",
        R"({"body": "a", "body": null})", R"({"n": "body", "m": "a"})"})
    EXPECT_EQ(why(line), "f:1: has no text in field \"body\" (--field)");
  EXPECT_EQ(text_field(R"({"n": {"a": [1]}, "body": 1, "body": "b", "c": "d"})",
                       "body", "f:1")
                .value(),
            "b");
  const std::string deep =
      R"({"body": "a", "more": )" + std::string(300'000, '[');
  EXPECT_EQ(why(deep.c_str()), "f:1: nested more than 256 deep");
}

// A few bytes of a compressed file can become a line of many values.
TEST(JsonLines, AValueThatIsNotWantedIsNotKept) {
  std::string line = R"({"n": [0)";
  for (int i = 0; i < 1'000'000; ++i) line += ",0";
  line += R"(], "text": "a"})";
  reset_allocations();
  EXPECT_EQ(text_field(line, "text", "f:1").value(), "a");
  EXPECT_LT(most_allocated(), line.size());
}

TEST(Inputs, FoldersAndPatternsBecomeTheirFiles) {
  const TempDir dir;
  for (const char* folder : {"in", "in/b", "in/.git", "none"})
    std::filesystem::create_directory(dir / folder);
  for (const char* name : {"in/z.txt", "in/b/a.txt", "in/.hidden", "in/.git/x",
                           "c1.txt", "c2.txt", "[x].txt"})
    dir.write(name, "text");
  dir.write("in/empty.txt", "");
  const auto got = expand_inputs(
      {dir / "c*.txt", dir / "in", dir / "[x].txt", dir / "absent"});
  EXPECT_EQ(got.value(),
            (std::vector<std::string>{dir / "c1.txt", dir / "c2.txt",
                                      dir / "in/b/a.txt", dir / "in/z.txt",
                                      dir / "[x].txt", dir / "absent"}));
  EXPECT_EQ(expand_inputs({dir / "d*.txt"}).status().code(), Code::kNotFound);
  EXPECT_EQ(expand_inputs({dir / "none"}).status().code(), Code::kNotFound);
}

// Without end, or with each file up to 40 times, they would be followed.
TEST(Inputs, LinksThatLeadBackAreLeftOut) {
  namespace fs = std::filesystem;
  const TempDir dir;
  fs::create_directories(dir / "in/a");
  fs::create_directories(dir / "in/b");
  fs::create_directories(dir / "other");
  dir.write("in/a/x", "text");
  dir.write("other/y", "text");
  fs::create_symlink("..", dir / "in/a/up");
  fs::create_symlink("../b", dir / "in/a/to_b");
  fs::create_symlink("../a", dir / "in/b/to_a");
  fs::create_symlink("../other", dir / "in/c");
  EXPECT_EQ(expand_inputs({dir / "in"}).value(),
            (std::vector<std::string>{dir / "in/a/x", dir / "in/b/to_a/x",
                                      dir / "in/c/y"}));
  fs::create_symlink("gone", dir / "in/b/z");
  EXPECT_SAYS(expand_inputs({dir / "in"}), "z: a link to a missing file");
}

}  // namespace
}  // namespace remesh::data
