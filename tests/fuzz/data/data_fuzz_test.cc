// Fuzzes (tests/testing/fuzz.h) what parses external input: job files,
// overrides, the index of a data set, token shards, compressed text, and JSON
// lines of text, conversations and questions.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstddef>
#include <cstring>
#include <span>

#include "parallel/jobfile/jobfile.h"
#include "proto/data/index.h"
#include "tests/testing/expect.h"
#include "tests/testing/fuzz.h"
#include "tests/unit/data/data_test_util.h"
#include "worker/data/chat_template.h"
#include "worker/data/dataset.h"
#include "worker/data/json_lines.h"
#include "worker/data/mix.h"
#include "worker/data/prepare.h"
#include "worker/data/text_reader.h"
#include "worker/data/token_shard.h"
#include "worker/sample/evaluate.h"

namespace remesh {
namespace {

TEST(Fuzz, JobFiles) {
  const jobfile::TomlOrigin origin{"job.toml", "/jobs"};
  ASSERT_OK_AND(const auto plain,
                jobfile::parse_job("[data]\npath = \"x\"\n[train]\nsteps = "
                                   "9\n[model]\nflavor = \"tiny\"\n",
                                   origin));
  ASSERT_OK_AND(const auto resolved, jobfile::resolve(plain, {257}));
  const std::vector<std::string> inputs = {
      "[data]\npath = \"x\"\n[train]\nsteps = 9\nmax_norm = 1e-3\n",
      "data = { path = 'x' }\ntrain.dtype = \"bf16\"\n# comment\n",
      jobfile::to_toml(resolved), jobfile::commented_example()};
  fuzz(inputs, 6000, [&](const std::string& text) {
    const auto job = jobfile::parse_job(text, origin);
    if (!job.ok()) return job.status();
    const auto full = jobfile::resolve(*job, {257, 10'000, 1000});
    if (!full.ok()) return full.status();
    // Accepted input can be written and read again.
    const auto back = jobfile::parse_job(jobfile::to_toml(*full), origin);
    EXPECT_OK(back);
    if (!back.ok()) return back.status();
    EXPECT_EQ(back->SerializeAsString(), full->SerializeAsString());
    return full.status();
  });
}

TEST(Fuzz, Overrides) {
  const std::vector<std::string> inputs = {"train.steps=12",
                                           "optimizer.lr=3e-4",
                                           "data.path=../a b",
                                           "job.description=\"q\\\"\"",
                                           "model.tie_embeddings=true",
                                           "train.dtype=fp32"};
  fuzz(inputs, 10'000, [&](const std::string& text) {
    return jobfile::parse_job("[data]\npath = \"x\"\n", {}, {text}).status();
  });
}

class DataFuzz : public testing::Test {
 protected:
  void SetUp() override {
    std::string text;
    for (int i = 0; i < 4000; ++i)
      text += "wörd" + std::to_string(i * i % 977) +
              (i % 500 == 0 ? "\n<|endoftext|>\n"
               : i % 9 == 0 ? "\n"
                            : " ");
    text_ = text;
    data::PrepareOptions options;
    options.inputs = {dir_.write("in.txt", text)};
    options.out_dir = dir_ / "set";
    options.val_fraction = 0.1;
    ASSERT_OK(data::prepare(options, *posix_file_system()));
  }
  TempDir dir_;
  std::string text_;
};

TEST_F(DataFuzz, Index) {
  const std::string json = read_whole(dir_ / "set/dataset.json");
  fuzz({json}, 20'000, [&](const std::string& text) {
    const auto index = data::parse_index(text, "dataset.json");
    if (!index.ok()) return index.status();
    EXPECT_OK(data::parse_index(data::index_to_json(*index), "again"));
    return index.status();
  });
}

TEST_F(DataFuzz, ShardHeaders) {
  const std::string file = read_whole(dir_ / "set/train-00000.tok");
  const std::string head = file.substr(0, sizeof(data::ShardHeader));
  fuzz({head}, 50'000, [&](const std::string& text) {
    return data::parse_shard_header(std::as_bytes(std::span(text)), file.size(),
                                    "shard")
        .status();
  });
}

// Headers with a correct checksum but invalid fields.
TEST_F(DataFuzz, ShardHeadersResealed) {
  const std::string file = read_whole(dir_ / "set/train-00000.tok");
  const std::string head = file.substr(0, sizeof(data::ShardHeader));
  fuzz({head}, 50'000, [&](std::string text) {
    text.resize(sizeof(data::ShardHeader));
    const uint64_t sum =
        XXH3_64bits(text.data(), offsetof(data::ShardHeader, header_checksum));
    std::memcpy(text.data() + offsetof(data::ShardHeader, header_checksum),
                &sum, sizeof(sum));
    const auto info = data::parse_shard_header(std::as_bytes(std::span(text)),
                                               file.size(), "shard");
    if (info.ok()) {
      EXPECT_EQ(
          sizeof(data::ShardHeader) +
              static_cast<uint64_t>(info->num_tokens) * info->token_width +
              (info->has_marks ? data::mark_bytes(info->num_tokens) : 0),
          file.size());
    }
    return info.status();
  });
}

// Opens, reads and verifies a data set after changing any of its files.
TEST_F(DataFuzz, DataSetsOnDisk) {
  for (const char* name : {"train-00000.tok", "val-00000.tok"}) {
    const std::string path = std::string("set/") + name;
    const std::string good = read_whole(dir_ / path);
    fuzz({good}, 200, [&](const std::string& bytes) -> Status {
      dir_.write(path, bytes);
      ASSIGN_OR_RETURN(const data::Dataset set,
                       data::Dataset::open(dir_ / "set"));
      std::vector<int32_t> all(static_cast<size_t>(set.train().num_tokens()));
      RETURN_IF_ERROR(set.train().read(0, all));
      for (const int32_t token : all) EXPECT_LT(token, 257);
      RETURN_IF_ERROR(set.verify());
      EXPECT_EQ(bytes, good);  // only the original verifies
      return ok_status();
    });
    dir_.write(path, good);
  }
}

TEST_F(DataFuzz, JsonLines) {
  const std::string lines =
      "{\"text\": \"a \\u00e9\", \"id\": [1, {}]}\n\n{\"text\":\"\"}\n"
      "{\"messages\": [{\"role\": \"user\"}], \"text\": \"x\"}";
  fuzz({lines}, 10000, [&](const std::string& bytes) -> Status {
    auto reader = data::TextReader::open(dir_.write("fuzz.jsonl", bytes));
    if (!reader.ok()) return reader.status();
    return data::for_each_line(
        *reader,
        [](std::string_view line, const std::string& place) {
          return data::text_field(line, "text", place).status();
        },
        [](uint64_t) {});
  });
}

TEST_F(DataFuzz, Conversations) {
  ASSERT_OK_AND(
      const auto chat,
      data::ChatTemplate::open(dir_.write(
          "t.jinja",
          "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
          "{% if add_generation_prompt %}assistant:{% endif %}")));
  const std::string lines =
      R"({"messages": [{"role": "user", "content": "a \u00e9"}, )"
      R"({"role": "assistant", "content": "b"}], "id": 1})"
      "\n\n"
      R"({"tools": [{"x": 1.5}], "messages": [{"role": "system", "content": 1}]})";
  fuzz({lines}, 5000, [&](const std::string& bytes) -> Status {
    ASSIGN_OR_RETURN(auto reader,
                     data::TextReader::open(dir_.write("fuzz.jsonl", bytes)));
    return data::for_each_line(
        reader,
        [&](std::string_view line, const std::string& place) {
          Status made = chat->render(line, place).status();
          // The program that renders it still runs.
          EXPECT_TRUE(made.ok() || made.code() == Code::kCorrupt)
              << made.to_string();
          return made;
        },
        [](uint64_t) {});
  });
}

TEST_F(DataFuzz, Questions) {
  fuzz({"{\"prompt\": \"a \\u00e9\", \"choices\": [\"b\", \"c\"], "
        "\"answer\": 1}\n\n"
        "{\"prompt\": \"\", \"choices\": [\"x\", \"y\", \"z\"], "
        "\"answer\": 0, \"id\": [{}]}"},
       10'000, [&](const std::string& text) -> Status {
         ASSIGN_OR_RETURN(const auto questions,
                          sample::parse_questions(text, "q.jsonl"));
         for (const sample::Question& q : questions) {
           EXPECT_GE(q.choices.size(), 2U);
           EXPECT_GE(q.answer, 0);
           EXPECT_LT(q.answer, std::ssize(q.choices));
         }
         return ok_status();
       });
}

TEST_F(DataFuzz, Mixtures) {
  ASSERT_OK(data::mix({.members = {dir_ / "set=0.5"}, .out_dir = dir_ / "mix"},
                      *posix_file_system()));
  const std::string json = read_whole(dir_ / "mix/dataset.json");
  fuzz({json}, 5000, [&](const std::string& text) {
    dir_.write("mix/dataset.json", text);
    return data::Dataset::open(dir_ / "mix").status();
  });
}

TEST_F(DataFuzz, CompressedAndPlainText) {
  std::vector<std::string> inputs = {text_};
  for (const char* filter : {"gzip", "xz", "zstd", "bzip2"})
    inputs.push_back(data::compressed(text_, filter));
  fuzz(inputs, 600, [&](const std::string& bytes) -> Status {
    const std::string path = dir_.write("fuzz.in", bytes);
    ASSIGN_OR_RETURN(data::TextReader reader, data::TextReader::open(path));
    size_t out = 0;
    data::BlockSplitter splitter(512, [&](const data::TextBlock& block) {
      EXPECT_LE(block.text.size(), 1024U);
      for (const size_t end : block.ends) EXPECT_LE(end, block.text.size());
      out += block.text.size();
      return ok_status();
    });
    const auto split = data::split_text(reader, /*raw_bytes=*/false, splitter,
                                        [](uint64_t) {});
    RETURN_IF_ERROR(split.status());
    return splitter.finish();
  });
}

}  // namespace
}  // namespace remesh
