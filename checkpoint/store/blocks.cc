#include "checkpoint/store/blocks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "proto/base/check.h"
#include "proto/base/xxh3.h"

namespace remesh::store {
namespace {

using Sum = Xxh128;
static_assert(sizeof(Sum) == kSumBytes);

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

uint64_t num_blocks(uint64_t data_bytes, uint64_t block_bytes) {
  return data_bytes / block_bytes + (data_bytes % block_bytes != 0 ? 1 : 0);
}

// Writes the list behind the data and records both in `shard`.
Status write_list(File& file, std::span<const std::byte> list,
                  uint64_t data_bytes, uint64_t block_bytes,
                  pb::ShardFile& shard) {
  if (!list.empty()) RETURN_IF_ERROR(file.write_at(data_bytes, list));
  shard.set_bytes(data_bytes + list.size());
  shard.set_data_bytes(data_bytes);
  shard.set_block_bytes(block_bytes);
  shard.set_xxh128(xxh128_text(as_text(list)));
  return ok_status();
}

// Reads a file and verifies it against its list.
class VerifiedFile final : public File {
 public:
  static Result<std::unique_ptr<VerifiedFile>> open(
      std::shared_ptr<File> file, const std::string& path,
      const pb::ShardFile& shard) {
    CHECK(shard.block_bytes() > 0);
    ASSIGN_OR_RETURN(const uint64_t bytes, file->size());
    const uint64_t data = shard.data_bytes();
    const uint64_t list_bytes =
        num_blocks(data, shard.block_bytes()) * kSumBytes;
    if (bytes != shard.bytes() || bytes != data + list_bytes)
      return corrupt(fmt::format("{}: {} bytes, the manifest says {}", path,
                                 bytes, shard.bytes()));
    std::vector<std::byte> list(list_bytes);
    RETURN_IF_ERROR(file->read_at(data, list));
    if (xxh128_text(as_text(list)) != shard.xxh128())
      return corrupt(fmt::format(
          "{}: the list of checksums at its end (bytes {}-{}) is damaged, or "
          "of another file",
          path, data, bytes - 1));
    return std::unique_ptr<VerifiedFile>(new VerifiedFile(
        std::move(file), path, std::move(list), data, shard.block_bytes()));
  }

  Status write_at(uint64_t, std::span<const std::byte>) override {
    return read_only();
  }
  Status truncate(uint64_t) override { return read_only(); }
  Status sync() override { return ok_status(); }
  Status close() override { return ok_status(); }  // others may read on
  Result<uint64_t> size() override { return data_bytes_; }

  // Full blocks are read into the caller's memory and verified there; a part of
  // a block is copied from the last one read, since reads are mostly
  // sequential.
  Status read_at(uint64_t offset, std::span<std::byte> out) override {
    if (offset > data_bytes_ || out.size() > data_bytes_ - offset)
      return corrupt(fmt::format("{}: ends at {}", path_, data_bytes_));
    while (!out.empty()) {
      const uint64_t block = offset / block_bytes_;
      const BadBlock all = extent(block);
      uint64_t n = std::min<uint64_t>(out.size(), all.end - offset);
      if (n == all.end - all.begin) {
        n = part_end(block, out.size()) - offset;
        RETURN_IF_ERROR(file_->read_at(offset, out.first(n)));
        RETURN_IF_ERROR(check(block, out.first(n)));
      } else {
        RETURN_IF_ERROR(cache(block));
        std::memcpy(out.data(), cached_bytes_.data() + (offset - all.begin), n);
      }
      offset += n;
      out = out.subspan(n);
    }
    return ok_status();
  }

  // The end of one read starting at `block`: full blocks, as many as fit into
  // `room`, but few enough to be verified while they are in the cache.
  uint64_t part_end(uint64_t block, uint64_t room) const {
    constexpr uint64_t kPart = uint64_t{1} << 20;
    const uint64_t begin = extent(block).begin;
    uint64_t end = extent(block).end;
    while (end < data_bytes_ && end - begin < kPart) {
      const uint64_t next = extent(++block).end;
      if (next - begin > room) break;
      end = next;
    }
    return end;
  }
  uint64_t count() const { return num_blocks(data_bytes_, block_bytes_); }
  BadBlock extent(uint64_t block) const {
    const uint64_t begin = block * block_bytes_;
    return {.begin = begin,
            .end = begin + std::min(block_bytes_, data_bytes_ - begin)};
  }
  // Whether the block matches its checksum.
  Result<bool> good(uint64_t block, std::vector<std::byte>& buffer) {
    const BadBlock e = extent(block);
    buffer.resize(e.end - e.begin);
    RETURN_IF_ERROR(file_->read_at(e.begin, buffer));
    return matches(block, buffer);
  }

 private:
  VerifiedFile(std::shared_ptr<File> file, std::string path,
               std::vector<std::byte> list, uint64_t data_bytes,
               uint64_t block_bytes)
      : file_(std::move(file)),
        path_(std::move(path)),
        list_(std::move(list)),
        data_bytes_(data_bytes),
        block_bytes_(block_bytes) {}

  Status read_only() const { return internal(path_ + ": open for reading"); }

  bool matches(uint64_t block, std::span<const std::byte> bytes) const {
    const Sum sum = xxh3_128(bytes);
    return std::memcmp(sum.data(), list_.data() + block * kSumBytes,
                       kSumBytes) == 0;
  }

  // `bytes` begin with block `block`.
  Status check(uint64_t block, std::span<const std::byte> bytes) const {
    for (; !bytes.empty(); ++block) {
      const size_t n = std::min<size_t>(bytes.size(), block_bytes_);
      if (!matches(block, bytes.first(n)))
        return corrupt(fmt::format("{}: {} are damaged: their checksum differs",
                                   path_, text(extent(block))));
      bytes = bytes.subspan(n);
    }
    return ok_status();
  }

  Status cache(uint64_t block) {
    if (cached_ == block) return ok_status();
    cached_.reset();
    const BadBlock e = extent(block);
    cached_bytes_.resize(e.end - e.begin);
    RETURN_IF_ERROR(file_->read_at(e.begin, cached_bytes_));
    RETURN_IF_ERROR(check(block, cached_bytes_));
    cached_ = block;
    return ok_status();
  }

  const std::shared_ptr<File> file_;
  const std::string path_;
  const std::vector<std::byte> list_;
  const uint64_t data_bytes_;
  const uint64_t block_bytes_;
  std::optional<uint64_t> cached_;  // block in cached_bytes_
  std::vector<std::byte> cached_bytes_;
};

}  // namespace

// --- writing --------------------------------------------------------------

// Computes the list from the bytes as they are written.
class BlockWriter::Sums {
 public:
  explicit Sums(uint64_t block_bytes) : block_bytes_(block_bytes) {
    CHECK(block_bytes > 0);
  }

  void add(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const size_t n = std::min<size_t>(bytes.size(), block_bytes_ - filled_);
      if (n == block_bytes_) {
        put(xxh3_128(bytes.first(n)));
      } else {
        stream_.add(bytes.data(), n);
        filled_ += n;
        if (filled_ == block_bytes_) end_block();
      }
      bytes = bytes.subspan(n);
    }
  }
  std::span<const std::byte> finish() {
    if (filled_ > 0) end_block();
    return list_;
  }
  uint64_t block_bytes() const { return block_bytes_; }

 private:
  void end_block() {
    put(stream_.digest_128());
    stream_.reset();
    filled_ = 0;
  }
  void put(const Sum& sum) {
    list_.insert(list_.end(), sum.begin(), sum.end());
  }

  const uint64_t block_bytes_;
  Xxh3Stream stream_;
  uint64_t filled_ = 0;  // of the current block
  std::vector<std::byte> list_;
};

BlockWriter::BlockWriter(File& file, uint64_t block_bytes)
    : file_(file), sums_(std::make_unique<Sums>(block_bytes)) {}

BlockWriter::~BlockWriter() = default;

// Small pieces are buffered. Large ones are hashed and written part by part, so
// that the write finds in the cache what the hash has read.
Status BlockWriter::append(std::span<const std::byte> bytes) {
  constexpr size_t kSmall = size_t{64} << 10;
  constexpr size_t kPart = size_t{1} << 20;
  if (bytes.size() >= kSmall) {
    RETURN_IF_ERROR(flush());
    while (!bytes.empty()) {
      const size_t n = std::min(bytes.size(), kPart / 4);
      RETURN_IF_ERROR(write(bytes.first(n)));
      bytes = bytes.subspan(n);
    }
    return ok_status();
  }
  buffer_.reserve(kPart);
  if (buffer_.size() + bytes.size() > kPart) RETURN_IF_ERROR(flush());
  buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  return ok_status();
}

Status BlockWriter::write(std::span<const std::byte> bytes) {
  sums_->add(bytes);
  RETURN_IF_ERROR(file_.write_at(written_, bytes));
  written_ += bytes.size();
  return ok_status();
}

Status BlockWriter::flush() {
  if (buffer_.empty()) return ok_status();
  RETURN_IF_ERROR(write(buffer_));
  buffer_.clear();
  return ok_status();
}

Status BlockWriter::finish(pb::ShardFile& shard) {
  RETURN_IF_ERROR(flush());
  return write_list(file_, sums_->finish(), written_, sums_->block_bytes(),
                    shard);
}

Status append_sums(File& file, uint64_t data_bytes, pb::ShardFile& shard,
                   uint64_t block_bytes) {
  std::vector<std::byte> list, buffer;
  for (uint64_t at = 0; at < data_bytes; at += buffer.size()) {
    buffer.resize(std::min(block_bytes, data_bytes - at));
    RETURN_IF_ERROR(file.read_at(at, buffer));
    const Sum sum = xxh3_128(buffer);
    list.insert(list.end(), sum.begin(), sum.end());
  }
  return write_list(file, list, data_bytes, block_bytes, shard);
}

// --- reading --------------------------------------------------------------

Result<std::vector<BadBlock>> find_bad_blocks(
    FileSystem& fs, const std::string& path, const pb::ShardFile& shard,
    const std::function<void(uint64_t)>& tick) {
  ASSIGN_OR_RETURN(auto opened, fs.open(path));
  ASSIGN_OR_RETURN(const auto file,
                   VerifiedFile::open(std::move(opened), path, shard));
  std::vector<BadBlock> bad;
  std::vector<std::byte> buffer;
  for (uint64_t b = 0; b < file->count(); ++b) {
    ASSIGN_OR_RETURN(const bool good, file->good(b, buffer));
    const BadBlock extent = file->extent(b);
    if (!good) bad.push_back(extent);
    if (tick) tick(extent.end - extent.begin);
  }
  return bad;
}

Result<std::unique_ptr<File>> open_verified(std::shared_ptr<File> file,
                                            const std::string& path,
                                            const pb::ShardFile& shard) {
  ASSIGN_OR_RETURN(auto verified,
                   VerifiedFile::open(std::move(file), path, shard));
  return std::unique_ptr<File>(std::move(verified));
}

std::string text(const BadBlock& block) {
  return fmt::format("bytes {}-{}", block.begin, block.end - 1);
}

}  // namespace remesh::store
