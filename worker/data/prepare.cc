#include "worker/data/prepare.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "proto/base/rng.h"
#include "proto/data/index.h"
#include "worker/data/dataset.h"
#include "worker/data/input_file.h"
#include "worker/data/text_reader.h"
#include "worker/data/token_shard.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::data {
namespace {

constexpr int64_t kMinBlock = 64;
constexpr int64_t kUsualBlock = 16 << 10;
constexpr int64_t kMaxBlock = 1 << 24;
constexpr size_t kPortion = size_t{1} << 20;
// What a file's name ends with until it is complete.
constexpr char kPartial[] = ".partial";
// Longer documents are encoded in parts.
constexpr size_t kPartBytes = size_t{4} << 20;

Status check_options(const PrepareOptions& o) {
  if (o.inputs.empty())
    return invalid_argument("prepare: no input: expected at least one file");
  if (o.out_dir.empty()) return invalid_argument("prepare: no output folder");
  if (!(o.val_fraction >= 0 && o.val_fraction <= 0.5))
    return invalid_argument(fmt::format(
        "--val-fraction {}: must be from 0 to 0.5", o.val_fraction));
  if (o.val_block_bytes != 0 &&
      (o.val_block_bytes < kMinBlock || o.val_block_bytes > kMaxBlock))
    return invalid_argument(
        fmt::format("--val-block-bytes {}: must be 0 or from {} to {}",
                    o.val_block_bytes, kMinBlock, kMaxBlock));
  if (o.shard_tokens < 1)
    return invalid_argument(
        fmt::format("--shard-tokens {}: must be at least 1", o.shard_tokens));
  return ok_status();
}

// A size with which about eight blocks are held out, estimated from the stored
// size; text compresses to about a quarter.
int64_t choose_block_bytes(const PrepareOptions& o,
                           const std::vector<TextReader>& inputs) {
  if (o.val_block_bytes != 0) return o.val_block_bytes;
  double text = 0;
  for (const TextReader& r : inputs)
    text += static_cast<double>(r.file_bytes()) * (r.compressed() ? 4 : 1);
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
  for (const InputEntry& i : inputs)
    text += fmt::format("input {} {}\n", i.bytes, i.xxh128);
  return hex(xxh3_128(std::as_bytes(std::span(text))));
}

// Counts bytes read over all inputs.
class Progress {
 public:
  Progress(const PrepareProgress& sink, const std::vector<TextReader>& inputs)
      : sink_(sink) {
    for (const TextReader& r : inputs) total_ += r.file_bytes();
  }
  void add(uint64_t bytes) {
    done_ += bytes;
    if (sink_) sink_(done_, std::max(done_, total_));
  }
  uint64_t total() const { return total_; }

 private:
  const PrepareProgress& sink_;
  uint64_t done_ = 0;
  uint64_t total_ = 0;
};

Result<std::vector<TextReader>> open_inputs(const PrepareOptions& o) {
  std::vector<TextReader> readers;
  for (const std::string& path : o.inputs) {
    ASSIGN_OR_RETURN(TextReader reader, TextReader::open(path, o.raw_bytes));
    if (reader.file_bytes() == 0)
      return invalid_argument(path + ": empty file");
    readers.push_back(std::move(reader));
  }
  return readers;
}

// Whether block number `block` is held out, as every (1 / fraction)-th is.
bool held_out(double fraction, double phase, int64_t block) {
  const auto b = static_cast<double>(block);
  return std::floor((b + 1) * fraction + phase) >
         std::floor(b * fraction + phase);
}

bool is_space(char c) {
  return std::isspace(static_cast<unsigned char>(c)) != 0;
}

// Where a text is best divided: behind the last line in its second half whose
// end has no white space beside it, or else at the end.
size_t part_end(std::string_view text) {
  for (size_t at = text.size() - 1; at > text.size() / 2; --at)
    if (text[at - 1] == '\n' && !is_space(text[at]) && !is_space(text[at - 2]))
      return at;
  return text.size();
}

// The shards of one split, under their temporary names.
class SplitWriter {
 public:
  SplitWriter(FileSystem& fs, std::string dir, std::string split,
              const tokenizer::Tokenizer& tokenizer, int64_t shard_tokens)
      : fs_(fs),
        dir_(std::move(dir)),
        split_(std::move(split)),
        tokenizer_(tokenizer),
        shard_tokens_(shard_tokens) {}
  // Removes files that were not renamed into place.
  ~SplitWriter() {
    for (const std::string& name : names_)
      (void)fs_.remove(dir_ + "/" + name + kPartial).ok();
  }
  SplitWriter(const SplitWriter&) = delete;
  SplitWriter& operator=(const SplitWriter&) = delete;

  Status append(std::span<const int32_t> tokens) {
    while (!tokens.empty()) {
      if (!writer_) RETURN_IF_ERROR(begin_shard());
      const auto room =
          static_cast<size_t>(shard_tokens_ - writer_->num_tokens());
      const size_t n = std::min(room, tokens.size());
      RETURN_IF_ERROR(writer_->append(tokens.first(n)));
      tokens = tokens.subspan(n);
      if (writer_->num_tokens() == shard_tokens_) RETURN_IF_ERROR(end_shard());
    }
    return ok_status();
  }
  Status finish() { return writer_ ? end_shard() : ok_status(); }
  const std::vector<ShardEntry>& entries() const { return entries_; }
  Status rename() {
    for (const std::string& name : names_)
      RETURN_IF_ERROR(
          fs_.rename(dir_ + "/" + name + kPartial, dir_ + "/" + name));
    return ok_status();
  }

 private:
  Status begin_shard() {
    const std::string name = fmt::format("{}-{:05}.tok", split_, names_.size());
    names_.push_back(name);
    ASSIGN_OR_RETURN(
        ShardWriter writer,
        ShardWriter::create(fs_, dir_ + "/" + name + kPartial, tokenizer_.id(),
                            tokenizer_.vocab_size()));
    writer_ = std::move(writer);
    return ok_status();
  }
  Status end_shard() {
    ASSIGN_OR_RETURN(const ShardInfo info, writer_->finish());
    entries_.push_back({names_.back(), info.num_tokens, info.checksum});
    writer_.reset();
    return ok_status();
  }

  FileSystem& fs_;
  std::string dir_;
  std::string split_;
  const tokenizer::Tokenizer& tokenizer_;
  int64_t shard_tokens_;
  std::vector<std::string> names_;
  std::vector<ShardEntry> entries_;
  std::optional<ShardWriter> writer_;
};

// Distributes blocks over the two splits and ends each document in its split.
//
// A document, as far as it is in one split, is encoded as a whole. If it is
// longer than kPartBytes, parts end where the usual tokenizers never merge.
class BlockRouter {
 public:
  BlockRouter(double fraction, uint64_t seed,
              const tokenizer::Tokenizer& tokenizer, SplitWriter& train,
              SplitWriter& val)
      : fraction_(fraction),
        phase_(static_cast<double>(
                   random_u64(seed, hash64("remesh.held_out"), 0) >> 11) *
               0x1p-53),
        tokenizer_(tokenizer),
        train_(train),
        val_(val) {}

  Status add(const TextBlock& block) {
    SplitWriter* to =
        held_out(fraction_, phase_, next_block_++) ? &val_ : &train_;
    const std::string_view text = block.text;
    size_t begin = 0;
    size_t k = 0;
    if (!block.ends.empty() && block.ends[0] == 0) {
      k = 1;
      RETURN_IF_ERROR(close());
    } else if (open_ != nullptr && open_ != to) {
      RETURN_IF_ERROR(close());  // the document continues in the other split
    }
    for (; k < block.ends.size(); ++k) {
      RETURN_IF_ERROR(append(to, text.substr(begin, block.ends[k] - begin)));
      RETURN_IF_ERROR(close());
      begin = block.ends[k];
    }
    return append(to, text.substr(begin));
  }

 private:
  Status append(SplitWriter* to, std::string_view text) {
    if (text.empty()) return ok_status();
    open_ = to;
    text_ += text;
    return text_.size() < kPartBytes ? ok_status()
                                     : encode_part(part_end(text_));
  }
  Status encode_part(size_t bytes) {
    if (bytes == 0) return ok_status();
    tokens_.clear();
    RETURN_IF_ERROR(tokenizer_.encode(
        std::string_view(text_).substr(0, bytes),
        {.special = false, .continues = continues_}, tokens_));
    text_.erase(0, bytes);
    continues_ = true;
    return open_->append(tokens_);
  }
  // Ends the open document in the split that has its last part.
  Status close() {
    if (open_ == nullptr) return ok_status();
    RETURN_IF_ERROR(encode_part(text_.size()));
    continues_ = false;
    const int32_t token = tokenizer_.end_of_text();
    return std::exchange(open_, nullptr)->append({&token, 1});
  }

  double fraction_;
  double phase_;
  const tokenizer::Tokenizer& tokenizer_;
  SplitWriter& train_;
  SplitWriter& val_;
  SplitWriter* open_ = nullptr;  // the split of a document without an end yet
  std::string text_;             // of that document, not yet encoded
  bool continues_ = false;       // parts of that document have been encoded
  int64_t next_block_ = 0;
  std::vector<int32_t> tokens_;
};

Result<std::vector<InputEntry>> hash_inputs(const PrepareOptions& o,
                                            Progress& progress) {
  std::vector<InputEntry> entries;
  std::vector<char> portion(kPortion);
  for (const std::string& path : o.inputs) {
    ASSIGN_OR_RETURN(InputFile file, InputFile::open(path));
    Xxh3Stream hash;
    uint64_t bytes = 0;
    for (;;) {
      ASSIGN_OR_RETURN(const size_t got,
                       file.read(portion.data(), portion.size()));
      if (got == 0) break;
      hash.add(portion.data(), got);
      bytes += got;
      progress.add(got);
    }
    entries.push_back({path, bytes, hex(hash.digest_128())});
  }
  return entries;
}

// The output folder: created if missing, locked, and unchanged on failure.
class OutDir {
 public:
  static Result<std::unique_ptr<OutDir>> open(FileSystem& fs,
                                              const std::string& path) {
    const bool existed = fs.exists(path);
    if (!existed) RETURN_IF_ERROR(fs.create_dirs(path));
    auto dir = std::unique_ptr<OutDir>(new OutDir(fs, path, !existed));
    dir->fd_ = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir->fd_ < 0) return errno_error("open folder " + path, errno);
    if (::flock(dir->fd_, LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return errno_error("lock " + path, errno);
      dir->made_ = false;  // the other process uses it
      return unavailable(path + ": another prepare is writing to this folder");
    }
    return dir;
  }
  ~OutDir() {
    if (made_) ::rmdir(path_.c_str());  // only succeeds while empty
    if (fd_ >= 0) ::close(fd_);
  }
  OutDir(const OutDir&) = delete;
  OutDir& operator=(const OutDir&) = delete;

  const std::string& path() const { return path_; }
  FileSystem& fs() const { return fs_; }
  bool has_index() const { return fs_.exists(path_ + "/" + kIndexName); }
  // The sorted names in the folder: those that prepare may have written (own),
  // and others (foreign).
  Status list(std::vector<std::string>& own,
              std::vector<std::string>& foreign) const {
    ASSIGN_OR_RETURN(std::vector<std::string> names, fs_.list(path_));
    for (std::string& name : names)
      (is_own(name) ? own : foreign).push_back(std::move(name));
    return ok_status();
  }

 private:
  OutDir(FileSystem& fs, std::string path, bool made)
      : fs_(fs), path_(std::move(path)), made_(made) {}
  static bool is_own(std::string_view name) {
    if (name.ends_with(kPartial)) name.remove_suffix(sizeof(kPartial) - 1);
    if (name == kIndexName) return true;
    return name.ends_with(".tok") &&
           (name.starts_with("train-") || name.starts_with("val-"));
  }

  FileSystem& fs_;
  std::string path_;
  bool made_;
  int fd_ = -1;
};

PrepareSummary summarize(const Index& index, uint64_t input_bytes) {
  PrepareSummary s;
  s.data_id = index.data_id;
  s.tokenizer = index.tokenizer;
  s.vocab_size = index.vocab_size;
  s.input_bytes = input_bytes;
  s.text_bytes = index.text_bytes;
  s.documents = index.documents;
  s.train_tokens = index.train_tokens();
  s.val_tokens = index.val_tokens();
  s.train_shards = static_cast<int64_t>(index.train.size());
  s.val_shards = static_cast<int64_t>(index.val.size());
  return s;
}

// Checks what is in the folder. Returns a summary if it has exactly the data
// set wanted, and nothing if prepare may write there.
Result<std::optional<PrepareSummary>> check_existing(const PrepareOptions& o,
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
  if (!out.has_index()) return std::optional<PrepareSummary>();
  auto text =
      read_file(out.fs(), out.path() + "/" + kIndexName, uint64_t{64} << 20);
  if (!text.ok()) return text.status();
  const auto index = parse_index(*text, out.path() + "/" + kIndexName);
  Status why = index.status();
  if (index.ok()) {
    ASSIGN_OR_RETURN(const std::vector<InputEntry> inputs,
                     hash_inputs(o, progress));
    if (index->source_id != source_id_of(o, block_bytes, inputs)) {
      why = already_exists("made from other inputs or options");
    } else if (const auto opened = Dataset::open(out.path()); opened.ok()) {
      PrepareSummary summary = summarize(*index, progress.total());
      summary.up_to_date = true;
      return std::optional<PrepareSummary>(summary);
    } else {
      why = opened.status();
    }
  }
  if (o.overwrite) return std::optional<PrepareSummary>();
  return already_exists(fmt::format(
      "{}: already has a data set ({}): choose another folder, or use "
      "--overwrite",
      out.path(), why.message()));
}

// Renames the finished files into place, the index last.
Status commit(const Index& index, const OutDir& out, SplitWriter& train,
              SplitWriter& val) {
  const std::string path = out.path() + "/" + kIndexName;
  Status wrote = write_file(out.fs(), path + kPartial, index_to_json(index));
  if (!wrote.ok()) {
    (void)out.fs().remove(path + kPartial).ok();
    return wrote;
  }
  std::vector<std::string> before;
  std::vector<std::string> foreign;
  RETURN_IF_ERROR(out.list(before, foreign));
  if (out.has_index()) {
    // From here until the last rename the folder has no data set.
    RETURN_IF_ERROR(out.fs().remove(path));
    RETURN_IF_ERROR(out.fs().sync_dir(out.path()));
  }
  RETURN_IF_ERROR(train.rename());
  RETURN_IF_ERROR(val.rename());
  RETURN_IF_ERROR(out.fs().sync_dir(out.path()));
  RETURN_IF_ERROR(out.fs().rename(path + kPartial, path));
  RETURN_IF_ERROR(out.fs().sync_dir(out.path()));
  for (const std::string& name : before) {
    const auto is_name = [&](const ShardEntry& e) { return e.file == name; };
    if (name != kIndexName &&
        std::none_of(index.train.begin(), index.train.end(), is_name) &&
        std::none_of(index.val.begin(), index.val.end(), is_name))
      (void)out.fs().remove(out.path() + "/" + name).ok();
  }
  return ok_status();
}

Status check_splits(const Index& index, const PrepareOptions& o,
                    int64_t block_bytes) {
  if (index.documents == 0)
    return invalid_argument(
        fmt::format("{}: no text, only document separators", o.inputs[0]));
  if (o.val_fraction > 0 && (index.val.empty() || index.train.empty()))
    return invalid_argument(fmt::format(
        "{} bytes of text: too little for a {} split with --val-fraction {} "
        "in blocks of {} bytes; use --val-fraction 0 for no held-out split, or "
        "a smaller --val-block-bytes (at least {})",
        index.text_bytes, index.val.empty() ? "validation" : "training",
        o.val_fraction, block_bytes, kMinBlock));
  return ok_status();
}

}  // namespace

Result<PrepareSummary> prepare(const PrepareOptions& given, FileSystem& fs,
                               const PrepareProgress& progress) {
  RETURN_IF_ERROR(check_options(given));
  ASSIGN_OR_RETURN(const std::unique_ptr<tokenizer::Tokenizer> tokenizer,
                   tokenizer::open_tokenizer(given.tokenizer));
  PrepareOptions options = given;
  options.tokenizer = tokenizer->id();
  ASSIGN_OR_RETURN(std::vector<TextReader> inputs, open_inputs(options));
  const int64_t block_bytes = choose_block_bytes(options, inputs);
  ASSIGN_OR_RETURN(const std::unique_ptr<OutDir> out,
                   OutDir::open(fs, options.out_dir));
  {
    Progress reading(progress, inputs);
    ASSIGN_OR_RETURN(const std::optional<PrepareSummary> existing,
                     check_existing(options, *out, block_bytes, reading));
    if (existing) return *existing;
  }
  SplitWriter train(fs, out->path(), "train", *tokenizer, options.shard_tokens);
  SplitWriter val(fs, out->path(), "val", *tokenizer, options.shard_tokens);
  BlockRouter router(options.val_fraction, options.seed, *tokenizer, train,
                     val);
  BlockSplitter splitter(static_cast<size_t>(block_bytes),
                         [&](const TextBlock& b) { return router.add(b); });
  Progress reading(progress, inputs);
  Index index;
  for (TextReader& reader : inputs) {
    ASSIGN_OR_RETURN(const uint64_t bytes,
                     split_text(reader, options.raw_bytes, splitter,
                                [&](uint64_t read) { reading.add(read); }));
    index.text_bytes += bytes;
    index.inputs.push_back(
        {reader.path(), reader.bytes_done(), reader.file_hash()});
  }
  RETURN_IF_ERROR(splitter.finish());
  RETURN_IF_ERROR(train.finish());
  RETURN_IF_ERROR(val.finish());
  index.tokenizer = tokenizer->id();
  index.vocab_size = tokenizer->vocab_size();
  index.end_of_text = tokenizer->end_of_text();
  index.documents = splitter.documents();
  index.train = train.entries();
  index.val = val.entries();
  index.source_id = source_id_of(options, block_bytes, index.inputs);
  index.data_id = data_id_of(index);
  RETURN_IF_ERROR(check_splits(index, options, block_bytes));
  RETURN_IF_ERROR(commit(index, *out, train, val));
  return summarize(index, reading.total());
}

}  // namespace remesh::data
