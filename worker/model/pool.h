// Pool: the memory of a stage, allocated from its backend and released
// together. A failed allocation is remembered, not returned, so that one check
// covers a long list of buffers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "worker/kernels/backend.h"

namespace remesh::model {

class Pool {
 public:
  explicit Pool(kernels::Backend& backend) : backend_(backend) {}
  ~Pool() {
    for (void* p : blocks_) backend_.release(p);
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // nullptr when memory is short; status() then fails.
  void* get(int64_t elements, kernels::Dtype d) {
    return take(static_cast<uint64_t>(elements) * kernels::dtype_size(d));
  }
  float* floats(int64_t elements) {
    return static_cast<float*>(get(elements, kernels::Dtype::kFp32));
  }
  int32_t* ints(int64_t elements) {
    return static_cast<int32_t*>(
        take(static_cast<uint64_t>(elements) * sizeof(int32_t)));
  }

  uint64_t bytes() const { return bytes_; }
  Status status() const {
    if (refused_ == 0) return ok_status();
    return exhausted("no memory for " + std::to_string(refused_) +
                     " bytes beside " + std::to_string(bytes_) +
                     " already held; use a smaller microbatch, sequence or "
                     "model, or recompute activations");
  }

 private:
  void* take(uint64_t bytes) {
    void* p = refused_ == 0 ? backend_.allocate(bytes) : nullptr;
    if (p == nullptr) {
      refused_ += bytes;
    } else {
      blocks_.push_back(p);
      bytes_ += bytes;
    }
    return p;
  }

  kernels::Backend& backend_;
  std::vector<void*> blocks_;
  uint64_t bytes_ = 0;
  uint64_t refused_ = 0;
};

}  // namespace remesh::model
