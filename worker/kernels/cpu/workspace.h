// Workspace: memory that grows to the largest requested size and is reused.
// Private to this folder.
#pragma once

#include <cstdint>

#include "proto/base/check.h"
#include "worker/kernels/host_memory.h"

namespace remesh::kernels {

class Workspace {
 public:
  void* reserve_bytes(int64_t bytes) {
    if (bytes > bytes_) {
      block_.reset();
      block_.reset(host_allocate(static_cast<size_t>(bytes)));
      CHECK_MSG(block_ != nullptr, "no memory for a kernel's workspace");
      bytes_ = bytes;
    }
    return block_.get();
  }
  float* reserve(int64_t floats) {
    return static_cast<float*>(
        reserve_bytes(floats * static_cast<int64_t>(sizeof(float))));
  }

 private:
  HostBlock block_;
  int64_t bytes_ = 0;
};

}  // namespace remesh::kernels
