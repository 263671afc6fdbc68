// SparseFile: a file in memory that stores only the pages written. HDF5 lays
// out a shard in it: the metadata is written, the data is a hole.
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
  // Holes read as zeros.
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
