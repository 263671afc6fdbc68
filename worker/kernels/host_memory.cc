#include "worker/kernels/host_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

namespace remesh::kernels {
namespace {
constexpr size_t kCacheLine = 64;
constexpr size_t kHugePage = size_t{2} << 20;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
}  // namespace

void* host_allocate(size_t bytes) {
  const bool large = bytes >= kHugePage;
  const size_t unit = large ? kHugePage : kCacheLine;
  const size_t size = round_up(bytes == 0 ? 1 : bytes, unit);
  void* p = std::aligned_alloc(unit, size);
  if (p == nullptr) return nullptr;
  // Advice only: without huge pages the block works as well, but slower.
  if (large) (void)::madvise(p, size, MADV_HUGEPAGE);
  std::memset(p, 0, size);
  return p;
}

void host_release(void* p) { std::free(p); }

}  // namespace remesh::kernels
