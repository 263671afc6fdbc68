// Per-block checksums of a shard, so that a reader of a part of it can verify
// that part without reading the rest.
//
//   [data: an HDF5 file, data_bytes][checksum of each block, 16 bytes each]
//
// The manifest stores the checksum of that list, and the manifest has its own,
// so every byte of a shard, HDF5's metadata included, is covered from the
// manifest down (a one-level Merkle tree), and a VerifiedFile returns only
// verified bytes. HDF5 ignores bytes beyond its end of file.
//
// Threads: one object belongs to one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "proto/manifest.pb.h"

namespace remesh::store {

// The list is 1/16384 of the data; verifying a part reads at most two blocks
// more than the part.
inline constexpr uint64_t kBlockBytes = uint64_t{1} << 18;
inline constexpr uint64_t kSumBytes = 16;

// Writes a file sequentially, each byte once, and computes the list on the way.
// Borrows the file.
class BlockWriter {
 public:
  explicit BlockWriter(File& file, uint64_t block_bytes = kBlockBytes);
  ~BlockWriter();
  BlockWriter(const BlockWriter&) = delete;
  BlockWriter& operator=(const BlockWriter&) = delete;

  Status append(std::span<const std::byte> bytes);
  // Writes the rest and the list; sets bytes, data_bytes, block_bytes and
  // xxh128 of `shard`. Does not sync.
  Status finish(pb::ShardFile& shard);

 private:
  class Sums;
  Status write(std::span<const std::byte> bytes);
  Status flush();

  File& file_;
  std::unique_ptr<Sums> sums_;
  std::vector<std::byte> buffer_;  // small pieces, not yet written
  uint64_t written_ = 0;
};

// The same for a file that was written in another order: reads it back.
Status append_sums(File& file, uint64_t data_bytes, pb::ShardFile& shard,
                   uint64_t block_bytes = kBlockBytes);

// A block whose checksum does not match.
struct BadBlock {
  uint64_t begin = 0, end = 0;  // bytes of the file
};

// Reads all blocks. Fails if the file's size or list does not match the
// manifest or it cannot be read. `tick` gets the bytes of each block after it.
// REQUIRES: shard.block_bytes() > 0.
Result<std::vector<BadBlock>> find_bad_blocks(
    FileSystem& fs, const std::string& path, const pb::ShardFile& shard,
    const std::function<void(uint64_t)>& tick = {});

// The data of the shard in `file`, for reading: size() is data_bytes, and
// read_at() verifies what it returns or fails with Corrupt, naming `path` and
// block. REQUIRES: shard.block_bytes() > 0.
Result<std::unique_ptr<File>> open_verified(std::shared_ptr<File> file,
                                            const std::string& path,
                                            const pb::ShardFile& shard);

// "bytes 0-262143"
std::string text(const BadBlock& block);

}  // namespace remesh::store
