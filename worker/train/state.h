// TrainState: what training changes, as flat fp32 vectors in the parameter
// table's order (ZeRO stage 0: every data-parallel rank holds all of it).
//
// Ownership: owns its memory, which comes zeroed and untouched from the
// backend. Capacity is rounded up to whole shares (share.h), so that parts can
// be gathered in place; the elements past num_elements stay zero.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "proto/base/status.h"
#include "worker/kernels/backend.h"

namespace remesh::train {

// A flat fp32 vector in the backend's memory.
class FlatBuffer {
 public:
  FlatBuffer() = default;
  // Fails (exhausted) when memory is short. `backend` must outlive it.
  static Result<FlatBuffer> make(kernels::Backend& backend, int64_t size,
                                 int64_t capacity);
  std::span<float> span() { return {data_.get(), static_cast<size_t>(size_)}; }
  std::span<const float> span() const {
    return {data_.get(), static_cast<size_t>(size_)};
  }
  std::span<float> padded() {
    return {data_.get(), static_cast<size_t>(capacity_)};
  }
  float* data() { return data_.get(); }

 private:
  struct Free {
    kernels::Backend* backend;
    void operator()(float* p) const { backend->release(p); }
  };
  std::unique_ptr<float, Free> data_{nullptr, Free{nullptr}};
  int64_t size_ = 0;
  int64_t capacity_ = 0;
};

struct TrainState {
  int64_t step = 0;  // updates made
  FlatBuffer weights;
  FlatBuffer exp_avg;
  FlatBuffer exp_avg_sq;
  FlatBuffer grads;
  bool grads_used = false;  // false: still as the backend made it, zero

  // num_elements parameters, to be shared by groups of up to `parts` ranks.
  static Result<TrainState> make(kernels::Backend& backend,
                                 int64_t num_elements, int parts);
};

}  // namespace remesh::train
