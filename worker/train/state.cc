#include "worker/train/state.h"

#include "proto/base/text.h"
#include "worker/train/share.h"

namespace remesh::train {

Result<FlatBuffer> FlatBuffer::make(kernels::Backend& backend, int64_t size,
                                    int64_t capacity) {
  CHECK(size >= 0 && capacity >= size);
  const size_t bytes = static_cast<size_t>(capacity) * sizeof(float);
  void* p = backend.allocate(bytes);
  if (p == nullptr)
    return exhausted("memory: no " + format_bytes(bytes) +
                     " for a vector of the training state");
  FlatBuffer b;
  b.data_ =
      std::unique_ptr<float, Free>(static_cast<float*>(p), Free{&backend});
  b.size_ = size;
  b.capacity_ = capacity;
  return b;
}

Result<TrainState> TrainState::make(kernels::Backend& backend,
                                    int64_t num_elements, int parts) {
  const int64_t capacity = share_length(num_elements, parts) * parts;
  TrainState s;
  for (FlatBuffer* b : {&s.weights, &s.exp_avg, &s.exp_avg_sq, &s.grads}) {
    ASSIGN_OR_RETURN(*b, FlatBuffer::make(backend, num_elements, capacity));
  }
  return s;
}

}  // namespace remesh::train
