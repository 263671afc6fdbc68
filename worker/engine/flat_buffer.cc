#include "worker/engine/flat_buffer.h"

#include "proto/base/text.h"

namespace remesh::engine {

Result<FlatBuffer> FlatBuffer::make(kernels::Backend& backend, int64_t size,
                                    const char* what) {
  CHECK(size >= 0);
  FlatBuffer b;
  if (size == 0) return b;
  const size_t bytes = static_cast<size_t>(size) * sizeof(float);
  void* p = backend.allocate(bytes);
  if (p == nullptr)
    return exhausted("memory: no " + format_bytes(bytes) + " for " + what);
  b.data_ = {static_cast<float*>(p), kernels::Release{&backend}};
  b.size_ = size;
  return b;
}

}  // namespace remesh::engine
