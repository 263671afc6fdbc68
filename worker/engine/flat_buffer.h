// FlatBuffer: a zeroed fp32 vector in a backend's memory, which it owns. The
// backend must outlive it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "proto/base/status.h"
#include "worker/kernels/backend.h"

namespace remesh::engine {

class FlatBuffer {
 public:
  FlatBuffer() = default;
  // Fails (exhausted), naming `what`, when memory is short.
  static Result<FlatBuffer> make(kernels::Backend& backend, int64_t size,
                                 const char* what);

  std::span<float> span() { return {data_.get(), static_cast<size_t>(size_)}; }
  std::span<const float> span() const {
    return {data_.get(), static_cast<size_t>(size_)};
  }
  float* data() { return data_.get(); }
  const float* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  uint64_t bytes() const { return static_cast<uint64_t>(size_) * 4; }

 private:
  std::unique_ptr<float, kernels::Release> data_;
  int64_t size_ = 0;
};

}  // namespace remesh::engine
