#include "tests/testing/allocations.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace remesh {
namespace {

std::atomic<int64_t> now = 0, most = 0, at_reset = 0;

void note(int64_t bytes) {
  int64_t before = most;
  while (before < bytes && !most.compare_exchange_weak(before, bytes)) {
  }
}

}  // namespace

void reset_allocations() {
  at_reset = now.load();
  most = now.load();
}

size_t most_allocated() { return static_cast<size_t>(most - at_reset); }

}  // namespace remesh

void* operator new(size_t size) {
  void* const p = std::malloc(std::max<size_t>(size, 1));
  if (p == nullptr) {
    remesh::note(remesh::now +
                 static_cast<int64_t>(std::min(size, SIZE_MAX / 4)));
    throw std::bad_alloc();
  }
  remesh::now += static_cast<int64_t>(malloc_usable_size(p));
  remesh::note(remesh::now);
  return p;
}

void operator delete(void* p) noexcept {
  if (p != nullptr) remesh::now -= static_cast<int64_t>(malloc_usable_size(p));
  std::free(p);
}

void operator delete(void* p, size_t) noexcept { operator delete(p); }
