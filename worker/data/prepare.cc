#include "worker/data/prepare.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <utility>

#include "proto/base/file_system.h"
#include "proto/data/index.h"
#include "worker/data/dataset.h"
#include "worker/data/inputs.h"
#include "worker/data/json_lines.h"
#include "worker/data/out_dir.h"
#include "worker/data/split_writer.h"
#include "worker/data/text_reader.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::data {
namespace {

constexpr int64_t kMinBlock = 64;
constexpr int64_t kUsualBlock = 16 << 10;
constexpr int64_t kMaxBlock = 1 << 24;
constexpr size_t kPortion = size_t{1} << 20;

// 2024-07-26.
bool is_date(const std::string& text) {
  int year = 0, month = 0, day = 0;
  return std::sscanf(text.c_str(), "%d-%d-%d", &year, &month, &day) == 3 &&
         fmt::format("{:04}-{:02}-{:02}", year, month, day) == text &&
         year >= 1 && year <= 9999 &&
         std::chrono::year_month_day(std::chrono::year(year) / month / day)
             .ok();
}

Status check_options(const PrepareOptions& o) {
  if (o.inputs.empty())
    return invalid_argument("prepare: no input: expected at least one file");
  if (o.out_dir.empty()) return invalid_argument("prepare: no output folder");
  if (!(o.val_fraction >= 0 && o.val_fraction <= 0.5) && o.val_fraction != 1)
    return invalid_argument(fmt::format(
        "--val-fraction {}: must be from 0 to 0.5 or, for validation only, 1",
        o.val_fraction));
  if (o.val_block_bytes != 0 &&
      (o.val_block_bytes < kMinBlock || o.val_block_bytes > kMaxBlock))
    return invalid_argument(
        fmt::format("--val-block-bytes {}: must be 0 or from {} to {}",
                    o.val_block_bytes, kMinBlock, kMaxBlock));
  if (o.chat && o.raw_bytes)
    return invalid_argument(
        "--chat and --raw-bytes: conversations are read from JSON lines; give "
        "one of the two");
  if (!is_date(o.chat_date))
    return invalid_argument(fmt::format(
        "--chat-date {}: must be a date like {}", o.chat_date, kChatDate));
  if (o.shard_tokens < 1)
    return invalid_argument(
        fmt::format("--shard-tokens {}: must be at least 1", o.shard_tokens));
  return ok_status();
}

struct Input {
  std::string path;
  uint64_t bytes = 0;  // as stored
  bool compressed = false;
};

// A size with which about eight blocks are held out, estimated from the stored
// size; text compresses to about a quarter.
int64_t choose_block_bytes(const PrepareOptions& o,
                           const std::vector<Input>& inputs) {
  if (o.val_block_bytes != 0) return o.val_block_bytes;
  double text = 0;
  for (const Input& i : inputs)
    text += static_cast<double>(i.bytes) * (i.compressed ? 4 : 1);
  if (o.val_fraction == 0) return kUsualBlock;
  return std::clamp(static_cast<int64_t>(text * o.val_fraction / 8), kMinBlock,
                    kUsualBlock);
}

std::string source_id_of(const PrepareOptions& o, int64_t block_bytes,
                         const std::vector<InputEntry>& inputs) {
  std::string text = fmt::format(
      "prepare 1\ntokenizer {}\nval_fraction {}\nval_block_bytes {}\n"
      "shard_tokens {}\nseed {}\nraw_bytes {}\n",
      o.tokenizer, o.val_fraction, block_bytes, o.shard_tokens, o.seed,
      o.raw_bytes);
  if (o.field != PrepareOptions().field) text += "field " + o.field + "\n";
  if (o.chat) text += "chat " + o.chat_template + "\n";
  for (const InputEntry& i : inputs)
    text +=
        fmt::format("input {} {}{}\n", i.bytes, i.xxh128,
                    !o.raw_bytes && is_json_lines(i.file) ? " json_lines" : "");
  return xxh128_text(text);
}

// Counts bytes read over all inputs.
class Progress {
 public:
  Progress(const PrepareProgress& sink, const std::vector<Input>& inputs)
      : sink_(sink) {
    for (const Input& i : inputs) total_ += i.bytes;
  }
  void add(uint64_t bytes) {
    done_ += bytes;
    if (sink_) sink_(done_, std::max(done_, total_));
  }

 private:
  const PrepareProgress& sink_;
  uint64_t done_ = 0;
  uint64_t total_ = 0;
};

// Of a file of another kind, or without the field, it fails: before hours of
// work, not after them.
Status check_first_line(const PrepareOptions& o, TextReader& reader) {
  const Status first = for_each_line(
      reader,
      [&](std::string_view line, const std::string& place) {
        const Status text = text_field(line, o.field, place).status();
        return text.ok() ? cancelled("read no more") : text;
      },
      [](uint64_t) {});
  return first.code() == Code::kCancelled ? ok_status() : first;
}

// Fails on a file that cannot be one.
Result<std::vector<Input>> check_inputs(const PrepareOptions& o) {
  std::vector<Input> out;
  for (const std::string& path : o.inputs) {
    ASSIGN_OR_RETURN(TextReader reader, TextReader::open(path, o.raw_bytes));
    if (reader.file_bytes() == 0)
      return invalid_argument(path + ": empty file");
    if (!o.raw_bytes && !o.chat && is_json_lines(path))
      RETURN_IF_ERROR(check_first_line(o, reader));
    if (o.chat && !is_json_lines(path))
      return invalid_argument(
          path + ": --chat reads files of JSON lines, named .jsonl or .json");
    out.push_back({path, reader.file_bytes(), reader.compressed()});
  }
  return out;
}

Result<std::vector<InputEntry>> hash_inputs(const PrepareOptions& o,
                                            Progress& progress) {
  std::vector<InputEntry> entries;
  std::vector<char> portion(kPortion);
  for (const std::string& path : o.inputs) {
    ASSIGN_OR_RETURN(TextReader file, TextReader::open(path, /*raw=*/true));
    for (size_t got = 1; got > 0; progress.add(got)) {
      ASSIGN_OR_RETURN(got, file.read(portion));
    }
    entries.push_back({path, file.bytes_done(), file.file_hash()});
  }
  return entries;
}

// Reads all of a data set.
Status verify(const std::string& folder) {
  ASSIGN_OR_RETURN(const Dataset set, Dataset::open(folder));
  return set.verify();
}

// Checks what is in the folder. Returns the index if it has exactly the data
// set wanted, and nothing if prepare may write there.
Result<std::optional<Index>> check_existing(const PrepareOptions& o,
                                            const OutDir& out,
                                            int64_t block_bytes,
                                            Progress& progress) {
  std::vector<std::string> own;
  std::vector<std::string> foreign;
  RETURN_IF_ERROR(out.list(own, foreign));
  if (!foreign.empty() && !out.has_index() && !o.overwrite)
    return already_exists(fmt::format(
        "{}: not empty and not a data set (it has {}): choose another folder, "
        "or use --overwrite to add the data set to these files",
        out.path(), foreign[0]));
  if (!out.has_index()) return std::optional<Index>();
  const std::string path = out.path() + "/" + kIndexName;
  const auto text = read_file(out.fs(), path, kMaxIndexBytes);
  const Result<Index> index =
      text.ok() ? parse_index(*text, path) : text.status();
  Status why = index.status();
  if (index.ok()) {
    ASSIGN_OR_RETURN(const std::vector<InputEntry> inputs,
                     hash_inputs(o, progress));
    if (index->source_id != source_id_of(o, block_bytes, inputs)) {
      why = already_exists("made from other inputs or options");
    } else if (o.overwrite && index->largest_token < 0) {
      // Made again, so that an index of an older version gets it.
    } else if (const Status sound = verify(out.path()); sound.ok()) {
      return std::optional<Index>(*index);
    } else {
      why = sound;
    }
  }
  if (o.overwrite) return std::optional<Index>();
  return already_exists(fmt::format(
      "{}: already has a data set ({}): choose another folder, or use "
      "--overwrite",
      out.path(), why.message()));
}

Status check_splits(const Index& index, const PrepareOptions& o,
                    int64_t block_bytes) {
  if (index.documents == 0)
    return invalid_argument(
        fmt::format("{}: no text, only ends of documents", o.inputs[0]));
  if (o.val_fraction > 0 && o.val_fraction < 1 &&
      (index.val.empty() || index.train.empty()))
    return invalid_argument(fmt::format(
        "{} bytes of text: too little for a {} split with --val-fraction {} "
        "in blocks of {} bytes; use --val-fraction 0 for no held-out split, or "
        "a smaller --val-block-bytes (at least {})",
        index.text_bytes, index.val.empty() ? "validation" : "training",
        o.val_fraction, block_bytes, kMinBlock));
  return ok_status();
}

// Reads the inputs, in order, into the two splits.
class Reading {
 public:
  Reading(const PrepareOptions& o, int64_t block_bytes, ChatTemplate* chat,
          BlockRouter& router, Progress& progress)
      : o_(o),
        chat_(chat),
        router_(router),
        progress_(progress),
        splitter_(static_cast<size_t>(block_bytes),
                  [this](const TextBlock& b) { return router_.add(b); }) {}

  Status add(const std::string& path, Index* index) {
    ASSIGN_OR_RETURN(TextReader reader, TextReader::open(path, o_.raw_bytes));
    RETURN_IF_ERROR(read(reader));
    index->text_bytes += std::exchange(text_bytes_, 0);
    index->inputs.push_back({path, reader.bytes_done(), reader.file_hash()});
    return ok_status();
  }
  Status finish() { return splitter_.finish(); }
  int64_t documents() const {
    return splitter_.documents() + router_.conversations();
  }

 private:
  Status read(TextReader& reader) {
    const auto progress = [this](uint64_t n) { progress_.add(n); };
    if (chat_ != nullptr)
      return for_each_line(
          reader,
          [this](std::string_view line, const std::string& place) {
            return add_conversation(line, place);
          },
          progress);
    ASSIGN_OR_RETURN(
        text_bytes_,
        o_.raw_bytes ? split_text(reader, true, splitter_, progress)
                     : split_documents(reader, o_.field, splitter_, progress));
    return ok_status();
  }
  Status add_conversation(std::string_view line, const std::string& place) {
    ASSIGN_OR_RETURN(const Conversation conversation,
                     chat_->render(line, place));
    for (const auto& piece : conversation) text_bytes_ += piece.text.size();
    return router_.add(conversation);
  }

  const PrepareOptions& o_;
  ChatTemplate* chat_;
  BlockRouter& router_;
  Progress& progress_;
  BlockSplitter splitter_;
  uint64_t text_bytes_ = 0;  // of the file
};

// The template in the file that --chat-template names, or that is beside the
// tokenizer.
Result<std::unique_ptr<ChatTemplate>> open_template(const PrepareOptions& o) {
  const std::string folder =
      o.tokenizer == "bytes" ? "" : parent_path(o.tokenizer);
  std::string path = o.chat_template;
  if (path.empty()) {
    if (folder.empty())
      return invalid_argument(
          "--chat: the tokenizer 'bytes' has no chat template; give one with "
          "--chat-template");
    ASSIGN_OR_RETURN(path, ChatTemplate::find(folder));
  }
  return ChatTemplate::open(path, folder, ChatTemplate::kMostSeconds,
                            o.chat_date);
}

}  // namespace

Result<Prepared> prepare(const PrepareOptions& given, FileSystem& fs,
                         const PrepareProgress& progress) {
  RETURN_IF_ERROR(check_options(given));
  PrepareOptions options = given;
  ASSIGN_OR_RETURN(options.inputs, expand_inputs(given.inputs));
  std::unique_ptr<ChatTemplate> chat;
  if (options.chat) {
    ASSIGN_OR_RETURN(chat, open_template(options));
    options.chat_template = chat->id();
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<tokenizer::Tokenizer> tokenizer,
                   tokenizer::open_tokenizer(given.tokenizer));
  options.tokenizer = tokenizer->id();
  ASSIGN_OR_RETURN(const std::vector<Input> inputs, check_inputs(options));
  const int64_t block_bytes = choose_block_bytes(options, inputs);
  ASSIGN_OR_RETURN(const std::unique_ptr<OutDir> out,
                   OutDir::open(fs, options.out_dir));
  {
    Progress hashing(progress, inputs);
    ASSIGN_OR_RETURN(std::optional<Index> existing,
                     check_existing(options, *out, block_bytes, hashing));
    if (existing)
      return Prepared{std::move(*existing), tokenizer->changes(),
                      /*up_to_date=*/true};
  }
  Index index{.tokenizer = tokenizer->id(),
              .vocab_size = tokenizer->vocab_size(),
              .end_of_text = tokenizer->end_of_text(),
              .marked = options.chat};
  SplitWriter train(fs, out->path(), "train", *tokenizer, options.shard_tokens,
                    index.marked);
  SplitWriter val(fs, out->path(), "val", *tokenizer, options.shard_tokens,
                  index.marked);
  BlockRouter router(options.val_fraction, options.seed, block_bytes,
                     *tokenizer, train, val);
  Progress done(progress, inputs);
  Reading reading(options, block_bytes, chat.get(), router, done);
  for (const Input& input : inputs)
    RETURN_IF_ERROR(reading.add(input.path, &index));
  RETURN_IF_ERROR(reading.finish());
  RETURN_IF_ERROR(router.finish());
  RETURN_IF_ERROR(train.finish());
  RETURN_IF_ERROR(val.finish());
  index.documents = reading.documents();
  index.train = train.entries();
  index.val = val.entries();
  index.largest_token = std::max(train.largest_token(), val.largest_token());
  index.source_id = source_id_of(options, block_bytes, index.inputs);
  index.data_id = data_id_of(index);
  RETURN_IF_ERROR(check_splits(index, options, block_bytes));
  if (chat && router.answer_tokens() == 0)
    return invalid_argument(
        options.inputs[0] +
        ": no conversation has an answer, so the loss would count nothing: "
        "expected messages whose \"role\" is \"assistant\"");
  RETURN_IF_ERROR(out->commit(index, {&train, &val}));
  return Prepared{std::move(index), tokenizer->changes()};
}

}  // namespace remesh::data
