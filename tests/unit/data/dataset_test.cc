#include "worker/data/dataset.h"

#include <cstddef>
#include <cstring>
#include <functional>
#include <random>

#include "proto/data/index.h"
#include "tests/unit/data/data_test_util.h"
#include "worker/data/mix.h"
#include "worker/data/out_dir.h"
#include "worker/data/token_shard.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::data {
namespace {

namespace fs = std::filesystem;
using tokenizer::kByteEndOfText;

// The tokens of a text with the bytes tokenizer and nothing held out.
std::vector<int32_t> naive_tokens(const std::string& text) {
  std::vector<int32_t> tokens;
  std::string rest = text;
  const std::string mark = "<|endoftext|>\n";
  for (;;) {
    const size_t at = rest.find(mark);
    const std::string document = rest.substr(0, at);
    for (const char c : document)
      tokens.push_back(static_cast<unsigned char>(c));
    if (!document.empty()) tokens.push_back(kByteEndOfText);
    if (at == std::string::npos) return tokens;
    rest = rest.substr(at + mark.size());
  }
}

class DatasetTest : public testing::Test {
 protected:
  PrepareOptions options(const std::string& text) {
    PrepareOptions o;
    o.inputs = {dir_.write("in.txt", text)};
    o.out_dir = dir_ / "out";
    return o;
  }
  std::string open_problem() {
    const auto d = Dataset::open(dir_ / "out");
    return d.ok() ? "" : d.status().message();
  }
  // Applies `change` to the bytes of a file of the data set.
  void damage(const std::string& name,
              const std::function<void(std::string&)>& change) {
    std::string bytes = read_whole(dir_ / ("out/" + name));
    change(bytes);
    dir_.write("out/" + name, bytes);
  }
  TempDir dir_;
};

TEST_F(DatasetTest, WithoutHoldingOutItIsTheTextAndItsEnds) {
  const std::string text = words(50'000);
  PrepareOptions o = options(text);
  o.val_fraction = 0;
  o.shard_tokens = 7919;  // many shards
  make(o);
  ASSERT_OK_AND(const auto d, Dataset::open(o.out_dir));
  EXPECT_EQ(tokens_of(d.train()), naive_tokens(text));
  EXPECT_EQ(d.val().num_tokens(), 0);
  EXPECT_EQ(d.vocab_size(), 257);
  EXPECT_EQ(d.end_of_text(), 256);
  EXPECT_EQ(d.data_id().size(), 32U);
  EXPECT_OK(d.verify());
}

TEST_F(DatasetTest, WindowsReadTheSameAcrossShardBorders) {
  const std::string text = words(2'000);
  PrepareOptions o = options(text);
  o.val_fraction = 0;
  o.shard_tokens = 97;
  make(o);
  ASSERT_OK_AND(const auto d, Dataset::open(o.out_dir));
  const std::vector<int32_t> all = naive_tokens(text);
  std::mt19937_64 rng(3);
  for (int trial = 0; trial < 500; ++trial) {
    const size_t n = rng() % 200;
    const size_t begin = rng() % (all.size() - n + 1);
    std::vector<int32_t> out(n);
    ASSERT_OK(d.train().read(static_cast<int64_t>(begin), out));
    ASSERT_TRUE(std::equal(out.begin(), out.end(),
                           all.begin() + static_cast<ptrdiff_t>(begin)));
  }
  std::vector<int32_t> in(64);
  std::vector<int32_t> target(64);
  std::vector<int64_t> starts;
  const auto last = (static_cast<int64_t>(all.size()) - 1) / 64 - 1;
  for (const int64_t w : {int64_t{0}, int64_t{5}, last}) {
    ASSERT_OK(d.train().read_window(w, 64, in, target, &starts));
    for (size_t k = 0; k < 64; ++k) {
      ASSERT_EQ(in[k], all[static_cast<size_t>(w) * 64 + k]);
      ASSERT_EQ(target[k], all[static_cast<size_t>(w) * 64 + k + 1]);
    }
  }
  EXPECT_FALSE(d.train().read_window(last + 1, 64, in, target, &starts).ok());
  EXPECT_FALSE(d.train().read_window(-1, 64, in, target, &starts).ok());
  EXPECT_FALSE(d.train().read(d.train().num_tokens(), in).ok());
  EXPECT_FALSE(d.train().read(INT64_MAX, in).ok());
  EXPECT_FALSE(d.train().read(-1, in).ok());
  EXPECT_OK(d.train().read(d.train().num_tokens(), {}));
}

TEST_F(DatasetTest, TheHeldOutShareIsRightSpreadAndLosesNoText) {
  const std::string text = words(400'000);
  PrepareOptions o = options(text);
  o.val_fraction = 0.05;
  o.val_block_bytes = 1024;
  make(o);
  ASSERT_OK_AND(const auto d, Dataset::open(o.out_dir));
  const auto train = tokens_of(d.train());
  const auto val = tokens_of(d.val());
  const double share = static_cast<double>(val.size()) /
                       static_cast<double>(val.size() + train.size());
  EXPECT_NEAR(share, 0.05, 0.006);
  EXPECT_EQ(val.back(), kByteEndOfText);
  EXPECT_EQ(train.back(), kByteEndOfText);
  // Every byte is in one split. Every held-out piece is a piece of the text,
  // and they are spread over it in order.
  const auto bytes = [](const std::vector<int32_t>& t) {
    return t.size() - static_cast<size_t>(std::count(t.begin(), t.end(), 256));
  };
  const auto whole = naive_tokens(text);
  EXPECT_EQ(bytes(train) + bytes(val), bytes(whole));
  std::string piece;
  size_t at = 0;
  size_t widest = 0;
  for (const int32_t token : val) {
    if (token != kByteEndOfText) {
      piece.push_back(static_cast<char>(token));
      continue;
    }
    const size_t found = text.find(piece, at);
    ASSERT_NE(found, std::string::npos) << piece;
    widest = std::max(widest, found - at);
    at = found + piece.size();
    piece.clear();
  }
  EXPECT_GT(at, text.size() * 9 / 10);
  EXPECT_LT(widest, size_t{25} * 1024);
}

TEST_F(DatasetTest, AllOfATextMayBeForValidation) {
  PrepareOptions o = options(words(50'000));
  o.val_fraction = 1;
  make(o);
  ASSERT_OK_AND(const auto d, Dataset::open(o.out_dir));
  EXPECT_EQ(d.train().num_tokens(), 0);
  EXPECT_EQ(tokens_of(d.val()), naive_tokens(words(50'000)));
  const auto mix_of = [&](const std::vector<std::string>& members) {
    return mix({.members = members, .out_dir = dir_ / "mix"},
               *posix_file_system());
  };
  const std::string val = o.out_dir;
  o.val_fraction = 0;
  o.out_dir = dir_ / "train";
  make(o);
  EXPECT_SAYS(mix_of({o.out_dir + "=1", val + "=1"}),
              "out: has no training text; give it weight 0");
  EXPECT_SAYS(mix_of({o.out_dir + "=0", val + "=0"}),
              "train: has no validation text");
  EXPECT_SAYS(mix_of({val + "=0"}), "nothing to train on");
  EXPECT_SAYS(mix_of({o.out_dir + "=1", val + "=-1"}), "must be FOLDER=WEIGHT");
  EXPECT_FALSE(fs::exists(dir_ / "mix"));
  EXPECT_OK(mix_of({o.out_dir + "=1", val + "=0"}));
  EXPECT_OK(Dataset::open(dir_ / "mix"));
}

TEST_F(DatasetTest, SeedsHoldOutOtherTextAndTheSameSeedTheSame) {
  PrepareOptions o = options(words(200'000));
  std::vector<std::string> ids;
  for (const uint64_t seed : {1, 2, 1}) {
    o.seed = seed;
    o.out_dir = dir_ / ("out" + std::to_string(ids.size()));
    ASSERT_OK_AND(const auto made, prepare(o, *posix_file_system()));
    EXPECT_GT(made.index.val_tokens(), 0);
    ids.push_back(made.index.data_id);
  }
  EXPECT_NE(ids[0], ids[1]);
  EXPECT_EQ(ids[0], ids[2]);
}

TEST_F(DatasetTest, CompressedInputGivesTheSameTokens) {
  const std::string text = words(100'000);
  PrepareOptions o = options(text);
  o.val_block_bytes = 512;
  make(o);
  for (const auto& [filter, suffix] : {std::pair{"gzip", "gz"},
                                       {"xz", "xz"},
                                       {"zstd", "zst"},
                                       {"bzip2", "bz2"}}) {
    o.inputs = {
        dir_.write(std::string("in.txt.") + suffix, compressed(text, filter))};
    o.out_dir = dir_ / suffix;
    make(o);
    EXPECT_EQ(Dataset::open(dir_ / "out")->data_id(),
              Dataset::open(dir_ / suffix)->data_id());
  }
}

TEST_F(DatasetTest, JsonLinesAreDocuments) {
  PrepareOptions o = options("a \u00e9\nb\n<|endoftext|>\nsecond\n");
  o.val_fraction = 0;
  make(o);
  o.inputs = {dir_.write("in.jsonl",
                         "{\"body\": \"a \\u00e9\\nb\\n\", \"id\": 1}\n\n"
                         "{\"body\": \"\"}\n{\"body\": \"second\\n\"}")};
  o.field = "body";
  o.out_dir = dir_ / "lines";
  make(o);
  const auto lines = Dataset::open(dir_ / "lines");
  EXPECT_EQ(Dataset::open(dir_ / "out")->data_id(), lines->data_id());
  // As Common Crawl's are named.
  o.inputs = {
      dir_.write("in.json.gz", compressed(read_whole(o.inputs[0]), "gzip"))};
  o.out_dir = dir_ / "json";
  make(o);
  EXPECT_EQ(Dataset::open(dir_ / "json")->data_id(), lines->data_id());
}

TEST_F(DatasetTest, JsonWithoutTheTextIsFoundBeforeAnythingIsRead) {
  PrepareOptions o = options(words(100'000));
  const auto says = [&](const std::string& name, const std::string& text,
                        const std::string& what) {
    o.inputs.resize(1);
    o.inputs.push_back(dir_.write(name, text));
    int calls = 0;
    EXPECT_SAYS(
        prepare(o, *posix_file_system(), [&](uint64_t, uint64_t) { ++calls; }),
        name + what);
    EXPECT_EQ(calls, 0);
  };
  says("a.jsonl", "{\"body\": \"a\"}\n", ":1: has no text in field");
  says("b.json", "\n[{\"text\": \"a\"}]\n", ":2: is no JSON object");
  says("c.json", "{\n  \"text\": \"a\"\n}\n", ":1: is no JSON object");
}

// A line with messages of a user and an assistant, in turns.
std::string conversation(const std::vector<std::string>& messages) {
  std::string out;
  for (size_t i = 0; i < messages.size(); ++i)
    out += std::string(i == 0 ? "" : ", ") + "{\"role\": \"" +
           (i % 2 == 0 ? "user" : "assistant") + "\", \"content\": \"" +
           messages[i] + "\"}";
  return "{\"messages\": [" + out + "]}\n";
}

// Two conversations, of which the loss counts what is in capitals.
TEST_F(DatasetTest, OfConversationsTheLossCountsTheAnswers) {
  PrepareOptions o = options("x");
  o.inputs = {dir_.write(
      "in.jsonl", conversation({"ab", "CD"}) + conversation({"e", "F", "g"}))};
  o.chat = true;
  o.chat_template = dir_.write(
      "t.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
  o.val_fraction = 0;
  o.shard_tokens = 3;
  make(o);
  ASSERT_OK_AND(const auto d, Dataset::open(o.out_dir));
  EXPECT_OK(d.verify());
  ASSERT_EQ(d.train().num_tokens(), 7);
  std::vector<int32_t> input(6), target(6);
  std::vector<int64_t> starts;
  ASSERT_OK(d.train().read_window(0, 6, input, target, &starts));
  EXPECT_EQ(input, (std::vector<int32_t>{'a', 'b', 'C', 'D', 'e', 'F'}));
  EXPECT_EQ(target, (std::vector<int32_t>{-1, 'C', 'D', -1, 'F', -1}));
  EXPECT_EQ(starts, (std::vector<int64_t>{4}));
  EXPECT_EQ(d.token_limit(), 'g' + 1);
}

TEST_F(DatasetTest, ProgressRisesToTheTotal) {
  PrepareOptions o = options(words(3'000'000));
  uint64_t last = 0;
  uint64_t total = 0;
  int calls = 0;
  ASSERT_OK_AND(const auto made, prepare(o, *posix_file_system(),
                                         [&](uint64_t done, uint64_t all) {
                                           EXPECT_GE(done, last);
                                           last = done;
                                           total = all;
                                           ++calls;
                                         }));
  EXPECT_EQ(last, fs::file_size(o.inputs[0]));
  EXPECT_EQ(total, last);
  EXPECT_GE(calls, 3);
  EXPECT_EQ(made.index.inputs.at(0).bytes, last);
  EXPECT_EQ(made.index.text_bytes, last);
  EXPECT_GT(made.index.documents, 10);
}

TEST_F(DatasetTest, BadInputIsAClearErrorAndLeavesNoFolder) {
  const auto says = [&](const PrepareOptions& o, const std::string& what) {
    EXPECT_SAYS(prepare(o, *posix_file_system()), what);
    EXPECT_FALSE(fs::exists(dir_ / "out")) << what;
  };
  says(options(""), "in.txt: empty");
  says(options("<|endoftext|>\n<|endoftext|>\n"), "no text");
  says(options(std::string(20'000, 'a') + "\xFFz"),
       "in.txt: not UTF-8 at byte 20000");
  says(options("tiny"), "too little for a validation split");
  PrepareOptions o = options("x");
  o.inputs = {dir_ / "none.txt"};
  says(o, "none.txt: No such file");
  o = options(words(10'000));
  o.tokenizer = "byte";
  says(o, "tokenizer 'byte': no such file: expected bytes");
  o = options(words(10'000));
  o.val_fraction = 0.6;
  says(o, "--val-fraction 0.6: must be from 0 to 0.5 or");
  o = options(words(10'000));
  o.shard_tokens = 0;
  says(o, "--shard-tokens 0");
  o = options(words(10'000));
  const std::string half = xz(words(100'000));
  o.inputs = {dir_.write("b.xz", half.substr(0, half.size() / 2))};
  says(o, "b.xz: cannot be decompressed");
  o = options("x");
  o.inputs = {dir_.write("chats.jsonl", conversation({"ab"}))};
  o.chat = true;
  o.chat_template = dir_.write(
      "t.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
  o.val_fraction = 0;
  says(o, "chats.jsonl: no conversation has an answer");
  for (const char* date : {"2024-7-26", "2024-02-30", "today", "26-07-2024"}) {
    o.chat_date = date;
    says(o, std::string("--chat-date ") + date + ": must be a date like");
  }
  o = options("x");
  o.inputs.clear();
  says(o, "no input");
}

TEST_F(DatasetTest, OtherFormatsAreNamedAndNotTakenForText) {
  for (const auto& [name, format] :
       std::vector<std::pair<const char*, const char*>>{
           {"a.gz", "named .gz, but not in that format"},
           {"b.zip", "zip"},
           {"c.json", "JSON"},
           {"d.parquet", "Parquet"},
           {"e.tar.zst", "tar"},
           {"f.tgz", "tar"}}) {
    PrepareOptions o = options("");
    o.inputs = {dir_.write(name, words(10'000))};
    const auto made = prepare(o, *posix_file_system());
    ASSERT_FALSE(made.ok()) << name;
    EXPECT_SAYS(made, format);
    o.raw_bytes = true;
    o.val_fraction = 0;
    o.overwrite = true;
    EXPECT_OK(prepare(o, *posix_file_system())) << name;
  }
}

TEST_F(DatasetTest, ShardFilesOfAnotherSizeAreNamed) {
  PrepareOptions o = options(words(50'000));
  o.shard_tokens = 7919;
  make(o);
  const auto problem = [&] {
    const std::string json = read_whole(dir_ / "out/dataset.json");
    return check_shard_files(o.out_dir, *parse_index(json, "index")).message();
  };
  EXPECT_EQ(problem(), "");
  damage("train-00002.tok", [](std::string& bytes) { bytes.pop_back(); });
  EXPECT_HAS(problem(),
             "train-00002.tok: 15965 bytes, but the index says 15966");
  std::filesystem::remove(dir_ / "out/train-00002.tok");
  EXPECT_HAS(problem(), "train-00002.tok: No such file");
}

TEST_F(DatasetTest, RawBytesCanBeAllowed) {
  PrepareOptions o = options(
      "ab\xFF\x80"
      "c\n");
  o.val_fraction = 0;
  o.raw_bytes = true;
  make(o);
  EXPECT_EQ(tokens_of(Dataset::open(o.out_dir)->train()),
            (std::vector<int32_t>{'a', 'b', 0xFF, 0x80, 'c', '\n', 256}));
}

TEST_F(DatasetTest, PreparingAgainIsUpToDateAndOtherDataAreRefused) {
  PrepareOptions o = options(words(100'000));
  make(o);
  const auto before = names_in(o.out_dir);
  ASSERT_OK_AND(const auto again, prepare(o, *posix_file_system()));
  EXPECT_TRUE(again.up_to_date);
  EXPECT_EQ(again.index.data_id, Dataset::open(o.out_dir)->data_id());
  o.seed = 5;
  EXPECT_EQ(prepare(o, *posix_file_system()).status().code(),
            Code::kAlreadyExists);
  EXPECT_EQ(names_in(o.out_dir), before);
  // A reader of the old data set is unaffected by its replacement.
  const auto old = Dataset::open(o.out_dir);
  o.overwrite = true;
  o.shard_tokens = 1 << 20;
  ASSERT_OK_AND(const auto replaced, prepare(o, *posix_file_system()));
  EXPECT_FALSE(replaced.up_to_date);
  EXPECT_EQ(Dataset::open(o.out_dir)->data_id(), replaced.index.data_id);
  EXPECT_OK(old->verify());
}

TEST_F(DatasetTest, DamagedTokensAreMadeAgain) {
  PrepareOptions o = options(words(50'000));
  make(o);
  damage("train-00000.tok", [](std::string& b) { b.back() ^= 1; });
  EXPECT_EQ(prepare(o, *posix_file_system()).status().code(),
            Code::kAlreadyExists);
  o.overwrite = true;
  ASSERT_OK_AND(const auto again, prepare(o, *posix_file_system()));
  EXPECT_FALSE(again.up_to_date);
  EXPECT_OK(Dataset::open(o.out_dir)->verify());
}

// The same bytes are other text under another name.
TEST_F(DatasetTest, AFileNamedAsJsonLinesLaterIsPreparedAgain) {
  const std::string lines = "{\"text\": \"one\"}\n{\"text\": \"two\"}\n";
  PrepareOptions o = options(lines);
  o.val_fraction = 0;
  EXPECT_EQ(prepare(o, *posix_file_system())->index.text_bytes, lines.size());
  o.inputs = {dir_.write("in.jsonl", lines)};
  o.overwrite = true;
  ASSERT_OK_AND(const auto again, prepare(o, *posix_file_system()));
  EXPECT_FALSE(again.up_to_date);
  EXPECT_EQ(again.index.text_bytes, 6);
  EXPECT_EQ(again.index.documents, 2);
}

TEST_F(DatasetTest, FewerShardsReplaceMoreWithoutRemains) {
  PrepareOptions o = options(words(50'000));
  o.shard_tokens = 10'000;
  make(o);
  o.shard_tokens = 1 << 20;
  o.overwrite = true;
  make(o);
  EXPECT_EQ(names_in(o.out_dir),
            (std::vector<std::string>{"dataset.json", "train-00000.tok",
                                      "val-00000.tok"}));
}

TEST_F(DatasetTest, AFailedOverwriteLeavesTheOldDataSet) {
  PrepareOptions o = options(words(50'000));
  make(o);
  const std::string id = Dataset::open(o.out_dir)->data_id();
  const auto before = names_in(o.out_dir);
  o = options(words(50'000) + "\xFF");
  o.overwrite = true;
  EXPECT_FALSE(prepare(o, *posix_file_system()).ok());
  EXPECT_EQ(Dataset::open(o.out_dir)->data_id(), id);
  EXPECT_EQ(names_in(o.out_dir), before);
}

TEST_F(DatasetTest, AnIndexThatCannotBeReadIsReplaced) {
  PrepareOptions o = options(words(50'000));
  make(o);
  fs::resize_file(dir_ / "out/dataset.json", kMaxIndexBytes + 1);
  const Status refused = prepare(o, *posix_file_system()).status();
  EXPECT_EQ(refused.code(), Code::kAlreadyExists);
  EXPECT_SAYS(refused, "67108865 bytes");
  o.overwrite = true;
  make(o);
  EXPECT_EQ(open_problem(), "");
}

TEST_F(DatasetTest, AnIndexThatCouldNotBeReadIsNotWritten) {
  PrepareOptions o = options(words(50'000));
  make(o);
  const auto before = names_in(o.out_dir);
  Index index;
  index.train.resize(kMaxIndexBytes / 4000 + 1,
                     {.file = std::string(4000, 'x'), .tokens = 1});
  const auto files = posix_file_system();
  ASSERT_OK_AND(const auto out, OutDir::open(*files, o.out_dir));
  EXPECT_EQ(out->commit(index, {}).code(), Code::kInvalidArgument);
  EXPECT_EQ(names_in(o.out_dir), before);
  EXPECT_EQ(open_problem(), "");
}

TEST_F(DatasetTest, ForeignFilesAreNeverTouched) {
  PrepareOptions o = options(words(50'000));
  fs::create_directories(o.out_dir);
  dir_.write("out/notes.txt", "mine");
  EXPECT_EQ(prepare(o, *posix_file_system()).status().code(),
            Code::kAlreadyExists);
  o.overwrite = true;
  make(o);
  EXPECT_EQ(read_whole(dir_ / "out/notes.txt"), "mine");
}

TEST_F(DatasetTest, RemainsOfAKilledPrepareAreReplaced) {
  PrepareOptions o = options(words(50'000));
  fs::create_directories(o.out_dir);
  dir_.write("out/train-00000.tok.partial", "junk");
  dir_.write("out/train-00007.tok", "junk");
  dir_.write("out/dataset.json.partial", "junk");
  EXPECT_HAS(open_problem(), "not a data set");
  make(o);
  EXPECT_EQ(names_in(o.out_dir),
            (std::vector<std::string>{"dataset.json", "train-00000.tok",
                                      "val-00000.tok"}));
}

TEST_F(DatasetTest, EveryDamageToAShardIsDetected) {
  PrepareOptions o = options(words(50'000));
  const std::string shard = "train-00000.tok";
  const auto says = [&](const std::string& what,
                        const std::function<void(std::string&)>& change) {
    o.overwrite = true;
    fs::remove_all(o.out_dir);
    make(o);
    damage(shard, change);
    EXPECT_HAS(open_problem(), what);
  };
  says("truncated", [](std::string& b) { b.resize(b.size() - 2); });
  says("truncated", [](std::string& b) { b.resize(b.size() - 1); });
  says("truncated", [](std::string& b) { b.resize(20); });
  says("truncated", [](std::string& b) { b.clear(); });
  says("truncated", [](std::string& b) { b += "xx"; });
  says("wrong magic", [](std::string& b) { b[0] = 'X'; });
  says("version 2", [](std::string& b) { b[8] = 2; });
  says("checksum", [](std::string& b) { b[33] = 'z'; });
  fs::remove(dir_ / ("out/" + shard));
  EXPECT_HAS(open_problem(), "no such file");
}

TEST_F(DatasetTest, ATokenOutOfRangeIsCaughtOnReadAndAnyBitByVerify) {
  make(options(words(50'000)));
  damage("train-00000.tok", [](std::string& b) {
    b[sizeof(ShardHeader) + 2 * 77 + 1] = 2;  // 512 and more
  });
  ASSERT_OK_AND(auto d, Dataset::open(dir_ / "out"));
  std::vector<int32_t> out(100);
  const Status status = d.train().read(0, out);
  EXPECT_EQ(status.code(), Code::kCorrupt);
  EXPECT_SAYS(status, " at 77: those of the data set are below 257");
  EXPECT_OK(d.train().read(100, out));
  EXPECT_EQ(d.verify().code(), Code::kCorrupt);
  damage("train-00000.tok", [](std::string& b) {
    b[sizeof(ShardHeader) + 2 * 77 + 1] = 0;
    b.back() = static_cast<char>(b.back() ^ 1);
  });
  ASSERT_OK_AND(d, Dataset::open(dir_ / "out"));
  EXPECT_EQ(d.verify().code(), Code::kCorrupt);
}

TEST_F(DatasetTest, ShardsOfAnotherDataSetOrVocabularyAreRefused) {
  make(options(words(50'000, 1)));
  PrepareOptions o = options(words(50'000, 2));
  o.out_dir = dir_ / "other";
  make(o);
  fs::copy_file(dir_ / "other/train-00000.tok", dir_ / "out/train-00000.tok",
                fs::copy_options::overwrite_existing);
  EXPECT_HAS(open_problem(), "another data set");
  auto writer = ShardWriter::create(*posix_file_system(),
                                    dir_ / "out/train-00000.tok", "bytes", 300);
  ASSERT_TRUE(writer.ok() && writer->append(std::vector<int32_t>{299}).ok() &&
              writer->finish().ok());
  EXPECT_HAS(open_problem(),
             "vocabulary of 300, but that of the data set has 257");
}

TEST_F(DatasetTest, BothTokenWidthsKeepEveryToken) {
  for (const int64_t vocab : {2, 65'536, 65'537, 200'000}) {
    const std::string path = dir_ / "wide.tok";
    ASSERT_OK_AND(auto writer, ShardWriter::create(*posix_file_system(), path,
                                                   "test", vocab));
    std::mt19937_64 rng(1);
    std::vector<int32_t> tokens(700'000);
    for (int32_t& t : tokens)
      t = static_cast<int32_t>(rng() % static_cast<uint64_t>(vocab));
    tokens[0] = static_cast<int32_t>(vocab - 1);
    ASSERT_OK(writer.append(tokens));
    ASSERT_OK(writer.finish());
    ASSERT_OK_AND(const auto shard, MappedShard::open(path));
    EXPECT_EQ(shard.info().token_width, vocab > 65'536 ? 4U : 2U);
    std::vector<int32_t> out(tokens.size());
    ASSERT_OK(shard.read(0, out));
    EXPECT_EQ(out, tokens);
    EXPECT_OK(shard.verify());
  }
}

// A read beyond the end of the file would kill the process, and so would one
// for which the storage returns an error.
TEST_F(DatasetTest, TokensThatCannotBeReadAnyMoreAreAnError) {
  for (const bool marks : {false, true}) {
    const std::string path = dir_ / "shrinks.tok";
    ASSERT_OK_AND(auto writer, ShardWriter::create(*posix_file_system(), path,
                                                   "test", 200'000, marks));
    const std::vector<int32_t> tokens(300'000, 7);
    ASSERT_OK(writer.append(tokens));
    ASSERT_OK(writer.finish());
    ASSERT_OK_AND(const auto shard, MappedShard::open(path));
    fs::resize_file(path, 400'000);
    std::vector<int32_t> out(tokens.size());
    const Status read = shard.read(0, out);
    EXPECT_EQ(read.code(), Code::kIo);
    EXPECT_HAS(read.message(), path);
    EXPECT_OK(shard.read(0, std::span(out).first(50'000)));
    EXPECT_EQ(shard.load_marks(0, 300'000).code(),
              marks ? Code::kIo : Code::kOk);
  }
}

// As a version wrote it that did not note the largest token.
TEST_F(DatasetTest, AnOlderIndexIsReadAndCompletedWhenItIsReplaced) {
  PrepareOptions o = options(std::string(5000, 'a'));
  o.val_fraction = 0;
  make(o);
  const MixOptions mixture{.members = {o.out_dir + "=1"},
                           .out_dir = dir_ / "mix"};
  ASSERT_OK(mix(mixture, *posix_file_system()));
  for (const char* index : {"dataset.json", "../mix/dataset.json"})
    damage(index, [](std::string& json) {
      const size_t at = json.find("  \"largest_token\"");
      json.erase(at, json.find('\n', at) + 1 - at);
    });
  EXPECT_OK(mix(mixture, *posix_file_system()));
  ASSERT_OK_AND(const auto older, prepare(o, *posix_file_system()));
  EXPECT_TRUE(older.up_to_date);
  EXPECT_EQ(older.index.largest_token, -1);
  EXPECT_EQ(older.index.token_limit(), 257);
  o.overwrite = true;
  ASSERT_OK_AND(const auto newer, prepare(o, *posix_file_system()));
  EXPECT_EQ(newer.index.largest_token, kByteEndOfText);
  EXPECT_EQ(newer.index.data_id, older.index.data_id);
}

TEST(Index, ComesBackFromJsonTheSameAndItsIdCoversTheShards) {
  Index index;
  const std::string hash(32, 'a');
  index.tokenizer = "bytes";
  index.vocab_size = 257;
  index.end_of_text = 256;
  index.documents = 3;
  index.text_bytes = 99;
  index.source_id = hash;
  index.train = {{"train-00000.tok", 5, hash}, {"train-00001.tok", 7, hash}};
  index.val = {{"val-00000.tok", 2, hash}};
  index.inputs = {{"/x/\"y\".txt", 99, hash}};
  index.data_id = data_id_of(index);
  ASSERT_OK_AND(const auto back, parse_index(index_to_json(index), "i"));
  EXPECT_EQ(back, index);
  EXPECT_EQ(back.train_tokens(), 12);
  const auto says = [&](const std::string& from, const std::string& to,
                        const std::string& what) {
    std::string json = index_to_json(index);
    json.replace(json.find(from), from.size(), to);
    const auto bad = parse_index(json, "i");
    EXPECT_EQ(bad.status().code(), Code::kCorrupt) << to;
    EXPECT_SAYS(bad, what);
  };
  says("\"tokens\": 7", "\"tokens\": 8", "data_id");
  says("\"tokens\": 7", "\"tokens\": -8", "i: train[1]: tokens = -8: must be");
  says("val-00000", "../val", "must be a file name");
  says("\"version\": 1", "\"version\": 2", "version = 2: must be 1");
  says("remesh-dataset", "other", "format");
  says("\"vocab_size\": 257", "\"vocab_size\": \"257\"", "vocab_size");
  says("\"vocab_size\": 257,", "", "vocab_size is missing");
  says("\"largest_token\": -1", "\"largest_token\": 257",
       "largest_token = 257");
  says("{", "", "not JSON");
  EXPECT_EQ(back.token_limit(), 257);
  index.largest_token = 120;
  EXPECT_EQ(parse_index(index_to_json(index), "i")->token_limit(), 121);
  index.inputs.assign(600'000, {"/x/y.txt", 99, hash});
  const std::string many = index_to_json(index);
  EXPECT_LT(many.size(), kMaxIndexBytes / 16);
  EXPECT_EQ(parse_index(many, "i")->inputs.size(), kMostInputs);
}

TEST(Corpus, TheShippedTextMakesADataSet) {
  const TempDir dir;
  PrepareOptions o;
  o.inputs = {"deploy/data/books.txt.xz"};
  o.out_dir = dir / "books";
  ASSERT_OK_AND(const auto made, prepare(o, *posix_file_system()));
  EXPECT_EQ(made.index.text_bytes, 20'118'430U);
  EXPECT_EQ(made.index.documents, 370);
  EXPECT_NEAR(static_cast<double>(made.index.val_tokens()), 201'000, 30'000);
  EXPECT_OK(Dataset::open(o.out_dir)->verify());
}

}  // namespace
}  // namespace remesh::data
