#include "worker/data/token_shard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "proto/base/check.h"

namespace remesh::data {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;
constexpr int64_t kMaxVocab = int64_t{1} << 31;

uint64_t header_checksum(const ShardHeader& h) {
  return xxh3(&h, offsetof(ShardHeader, header_checksum));
}

// Widens `out.size()` tokens; returns the largest.
template <typename T>
uint32_t widen(const std::byte* from, std::span<int32_t> out) {
  uint32_t largest = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    T token;
    std::memcpy(&token, from + i * sizeof(T), sizeof(T));
    largest = std::max<uint32_t>(largest, token);
    out[i] = static_cast<int32_t>(token);
  }
  return largest;
}

// Stores the tokens as T, little-endian; returns the largest.
template <typename T>
uint32_t narrow(std::span<const int32_t> tokens, std::byte* to) {
  uint32_t largest = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    largest = std::max(largest, static_cast<uint32_t>(tokens[i]));
    const auto token = static_cast<T>(tokens[i]);
    std::memcpy(to + i * sizeof(T), &token, sizeof(T));
  }
  return largest;
}

}  // namespace

Result<ShardInfo> parse_shard_header(std::span<const std::byte> header,
                                     uint64_t file_bytes,
                                     const std::string& name) {
  if (header.size() < sizeof(ShardHeader))
    return corrupt(
        fmt::format("{}: truncated: {} bytes, a token shard has a header of {}",
                    name, header.size(), sizeof(ShardHeader)));
  ShardHeader h;
  std::memcpy(&h, header.data(), sizeof(h));
  if (std::memcmp(h.magic, kShardMagic, sizeof(h.magic)) != 0)
    return corrupt(name + ": wrong magic number: not a token shard");
  if (h.version != kShardVersion)
    return corrupt(fmt::format("{}: shard version {}: this program supports {}",
                               name, h.version, kShardVersion));
  if (h.header_checksum != header_checksum(h))
    return corrupt(name + ": header does not match its checksum");
  if (h.vocab_size < 1 || h.vocab_size > static_cast<uint64_t>(kMaxVocab))
    return corrupt(fmt::format("{}: vocab_size {}: must be from 1 to 2^31",
                               name, h.vocab_size));
  const auto vocab_size = static_cast<int64_t>(h.vocab_size);
  if (h.token_width != token_width(vocab_size))
    return corrupt(fmt::format(
        "{}: token width {}: a vocabulary of {} has tokens of {} bytes", name,
        h.token_width, vocab_size, token_width(vocab_size)));
  if (h.tokenizer[0] == 0 || h.tokenizer[sizeof(h.tokenizer) - 1] != 0)
    return corrupt(name + ": tokenizer id: must be 1 to 63 bytes");
  if (h.has_marks > 1)
    return corrupt(
        fmt::format("{}: has_marks {}: must be 0 or 1", name, h.has_marks));
  const uint64_t room = file_bytes - sizeof(ShardHeader);
  const bool fits = h.num_tokens <= room / h.token_width;
  const auto num_tokens = static_cast<int64_t>(fits ? h.num_tokens : 0);
  if (!fits || room != h.num_tokens * h.token_width +
                           (h.has_marks != 0 ? mark_bytes(num_tokens) : 0))
    return corrupt(fmt::format(
        "{}: {} bytes are not those of a header of {} and {} tokens of {} "
        "bytes{} (is it truncated?)",
        name, file_bytes, sizeof(ShardHeader), h.num_tokens, h.token_width,
        h.has_marks != 0 ? " with marks" : ""));
  return ShardInfo{h.token_width, h.has_marks != 0,
                   num_tokens,    vocab_size,
                   h.tokenizer,   hex(std::bit_cast<Xxh128>(h.checksum))};
}

ShardWriter::ShardWriter(std::unique_ptr<File> file, std::string tokenizer,
                         int64_t vocab_size, bool has_marks)
    : file_(std::move(file)),
      tokenizer_(std::move(tokenizer)),
      vocab_size_(vocab_size),
      width_(token_width(vocab_size)),
      has_marks_(has_marks) {
  buffer_.reserve(2 * kBufferBytes);
}

Result<ShardWriter> ShardWriter::create(FileSystem& fs, const std::string& path,
                                        const std::string& tokenizer,
                                        int64_t vocab_size, bool has_marks) {
  CHECK(vocab_size >= 1 && vocab_size <= kMaxVocab);
  CHECK(!tokenizer.empty() && tokenizer.size() < 64);
  ASSIGN_OR_RETURN(auto file, fs.create(path));
  // Until finish() the header is zero, so an unfinished file is not a shard.
  return ShardWriter(std::move(file), tokenizer, vocab_size, has_marks);
}

void ShardWriter::mark(size_t tokens, const Marks& marks) {
  const auto begin = static_cast<size_t>(num_tokens_);
  for (auto* bits : {&targets_, &begins_})
    bits->resize((begin + tokens + 7) / 8);
  const auto set = [](std::vector<std::byte>& bits, size_t token) {
    bits[token / 8] |= std::byte{1} << (token % 8);
  };
  for (size_t t = begin; marks.targets && t < begin + tokens; ++t)
    set(targets_, t);
  if (marks.begins_document && tokens > 0) set(begins_, begin);
}

Status ShardWriter::append(std::span<const int32_t> tokens,
                           const Marks& marks) {
  if (has_marks_) mark(tokens.size(), marks);
  num_tokens_ += static_cast<int64_t>(tokens.size());
  while (!tokens.empty()) {
    const size_t n = std::min(tokens.size(), kBufferBytes / width_);
    const size_t at = buffer_.size();
    buffer_.resize(at + n * width_);
    const uint32_t largest =
        width_ == 2 ? narrow<uint16_t>(tokens.first(n), &buffer_[at])
                    : narrow<uint32_t>(tokens.first(n), &buffer_[at]);
    CHECK_MSG(largest < static_cast<uint64_t>(vocab_size_),
              "the tokenizer returned a token outside its vocabulary");
    largest_token_ = std::max<int64_t>(largest_token_, largest);
    if (buffer_.size() >= kBufferBytes) RETURN_IF_ERROR(flush());
    tokens = tokens.subspan(n);
  }
  return ok_status();
}

Status ShardWriter::flush() {
  hash_.add(buffer_.data(), buffer_.size());
  RETURN_IF_ERROR(file_->write_at(written_, buffer_));
  written_ += buffer_.size();
  buffer_.clear();
  return ok_status();
}

Result<ShardInfo> ShardWriter::finish() {
  for (const auto* bits : {&targets_, &begins_})
    buffer_.insert(buffer_.end(), bits->begin(), bits->end());
  RETURN_IF_ERROR(flush());
  ShardHeader h{};
  std::memcpy(h.magic, kShardMagic, sizeof(h.magic));
  h.version = kShardVersion;
  h.token_width = width_;
  h.num_tokens = static_cast<uint64_t>(num_tokens_);
  h.vocab_size = static_cast<uint64_t>(vocab_size_);
  h.has_marks = has_marks_ ? 1 : 0;
  std::memcpy(h.tokenizer, tokenizer_.data(), tokenizer_.size());
  const Xxh128 checksum = hash_.digest_128();
  std::memcpy(h.checksum, checksum.data(), checksum.size());
  h.header_checksum = header_checksum(h);
  RETURN_IF_ERROR(file_->write_at(0, std::as_bytes(std::span(&h, 1))));
  RETURN_IF_ERROR(file_->sync());
  RETURN_IF_ERROR(file_->close());
  return ShardInfo{width_,      has_marks_, num_tokens_,
                   vocab_size_, tokenizer_, hex(checksum)};
}

Result<MappedShard> MappedShard::open(const std::string& path, int64_t limit) {
  ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path));
  RETURN_IF_ERROR(file.load(
      file.bytes().first(std::min(file.bytes().size(), sizeof(ShardHeader)))));
  ASSIGN_OR_RETURN(ShardInfo info,
                   parse_shard_header(file.bytes(), file.bytes().size(), path));
  return MappedShard(std::move(file), std::move(info), limit);
}

Status MappedShard::read(int64_t begin, std::span<int32_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  CHECK(begin >= 0 && count <= info_.num_tokens &&
        begin <= info_.num_tokens - count);
  const std::byte* from =
      payload().data() + static_cast<size_t>(begin) * info_.token_width;
  RETURN_IF_ERROR(file_.load({from, out.size() * info_.token_width}));
  const uint32_t largest = info_.token_width == 2 ? widen<uint16_t>(from, out)
                                                  : widen<uint32_t>(from, out);
  if (largest < limit_) return ok_status();
  const auto bad = std::find_if(out.begin(), out.end(), [&](int32_t token) {
    return static_cast<uint32_t>(token) >= limit_;
  });
  return corrupt(fmt::format(
      "{}: token {} at {}: those of the data set are below {}", path(),
      static_cast<uint32_t>(*bad), begin + (bad - out.begin()), limit_));
}

Status MappedShard::load_marks(int64_t begin, int64_t count) const {
  if (!info_.has_marks) return ok_status();
  const auto first = static_cast<uint64_t>(begin) / 8;
  const uint64_t end = (static_cast<uint64_t>(begin + count) + 7) / 8;
  for (const uint64_t array : {0, 1})
    RETURN_IF_ERROR(file_.load(marks(array).subspan(first, end - first)));
  return ok_status();
}

std::span<const std::byte> MappedShard::marks(uint64_t array) const {
  const auto tokens = static_cast<uint64_t>(info_.num_tokens);
  const uint64_t bytes = (tokens + 7) / 8;
  return payload().subspan(tokens * info_.token_width + array * bytes, bytes);
}

bool MappedShard::bit(uint64_t array, int64_t token) const {
  CHECK(token >= 0 && token < info_.num_tokens);
  const auto t = static_cast<uint64_t>(token);
  return (marks(array)[t / 8] >> (t % 8) & std::byte{1}) != std::byte{0};
}

Status MappedShard::verify() const {
  const std::string found = hex(xxh3_128(payload()));
  if (found != info_.checksum)
    return corrupt(fmt::format(
        "{}: the tokens do not match their checksum: {} stored, {} found",
        path(), info_.checksum, found));
  std::vector<int32_t> block(1 << 16);
  for (int64_t at = 0; at < info_.num_tokens;) {
    const int64_t n = std::min<int64_t>(static_cast<int64_t>(block.size()),
                                        info_.num_tokens - at);
    RETURN_IF_ERROR(read(at, std::span(block).first(static_cast<size_t>(n))));
    at += n;
  }
  return ok_status();
}

}  // namespace remesh::data
