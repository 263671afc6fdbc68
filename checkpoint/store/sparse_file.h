// SparseFile: a file in memory of which little is written, however large it is.
// HDF5 lays out a shard in it: the metadata is there, the data's place is
// empty.
//
// Threads: one at a time.
#pragma once

#include <array>
#include <map>

#include "proto/base/file_system.h"

namespace remesh::store {

class SparseFile final : public File {
 public:
  Status write_at(uint64_t offset, std::span<const std::byte> bytes) override;
  // What was never written is zero.
  Status read_at(uint64_t offset, std::span<std::byte> bytes) override;
  Result<uint64_t> size() override { return size_; }
  Status truncate(uint64_t size) override;
  Status sync() override { return ok_status(); }
  Status close() override { return ok_status(); }

 private:
  static constexpr uint64_t kPage = 4096;
  std::map<uint64_t, std::array<std::byte, kPage>> pages_;  // by number
  uint64_t size_ = 0;
};

}  // namespace remesh::store
