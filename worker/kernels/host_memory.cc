#include "worker/kernels/host_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

namespace remesh::kernels {
namespace {
constexpr size_t kCacheLine = 64;
constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
}  // namespace

void* host_allocate(size_t bytes) {
  const bool large = bytes >= kHugePage;
  const size_t size =
      round_up(bytes == 0 ? 1 : bytes, large ? kPage : kCacheLine);
  void* p = nullptr;
  if (posix_memalign(&p, large ? kHugePage : kCacheLine, size) != 0)
    return nullptr;
  if (large) {
    // Complete huge pages only: the rest of the last one would be unrequested
    // memory in every block. This is advice: without huge pages the block works
    // too, but slower.
    const size_t whole = size / kHugePage * kHugePage;
    (void)::madvise(p, whole, MADV_HUGEPAGE);
    if (whole < size)
      (void)::madvise(static_cast<char*>(p) + whole, size - whole,
                      MADV_NOHUGEPAGE);
  }
  std::memset(p, 0, size);
  return p;
}

void host_release(void* p) { std::free(p); }

}  // namespace remesh::kernels
