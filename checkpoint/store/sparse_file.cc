#include "checkpoint/store/sparse_file.h"

#include <algorithm>
#include <cstring>

namespace remesh::store {

Status SparseFile::write_at(uint64_t offset, std::span<const std::byte> bytes) {
  size_ = std::max(size_, offset + bytes.size());
  while (!bytes.empty()) {
    const uint64_t in_page = offset % kPage;
    const size_t n = std::min<size_t>(bytes.size(), kPage - in_page);
    // A new page is all zeros.
    std::memcpy(pages_[offset / kPage].data() + in_page, bytes.data(), n);
    offset += n;
    bytes = bytes.subspan(n);
  }
  return ok_status();
}

Status SparseFile::read_at(uint64_t offset, std::span<std::byte> bytes) {
  if (offset > size_ || bytes.size() > size_ - offset)
    return corrupt("file in memory: ends at " + std::to_string(size_));
  while (!bytes.empty()) {
    const uint64_t in_page = offset % kPage;
    const size_t n = std::min<size_t>(bytes.size(), kPage - in_page);
    const auto page = pages_.find(offset / kPage);
    if (page == pages_.end())
      std::memset(bytes.data(), 0, n);
    else
      std::memcpy(bytes.data(), page->second.data() + in_page, n);
    offset += n;
    bytes = bytes.subspan(n);
  }
  return ok_status();
}

// Only ever to HDF5's end of allocation, beyond which it has written nothing.
Status SparseFile::truncate(uint64_t size) {
  size_ = size;
  return ok_status();
}

}  // namespace remesh::store
