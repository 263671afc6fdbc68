// Host memory for tensors: zeroed, 64-byte aligned, and on huge pages where the
// kernel grants them, because large matrices otherwise spend their time in the
// TLB. Thread-safe (no state).
#pragma once

#include <cstddef>
#include <memory>

namespace remesh::kernels {

// nullptr when memory is short. bytes == 0 gives a valid, empty block.
void* host_allocate(size_t bytes);
// REQUIRES: `p` came from host_allocate, or is nullptr.
void host_release(void* p);

struct HostDeleter {
  void operator()(void* p) const { host_release(p); }
};
using HostBlock = std::unique_ptr<void, HostDeleter>;

}  // namespace remesh::kernels
