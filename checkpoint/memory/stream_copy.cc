#include "checkpoint/memory/stream_copy.h"

#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace remesh::memory {

#ifdef __x86_64__
namespace {

constexpr size_t kLine = 64;

// Copies full cache lines to a target that is aligned to one.
void copy_sse2(std::byte* to, const std::byte* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += kLine)
    for (size_t k = 0; k < kLine; k += 16)
      _mm_stream_si128(
          reinterpret_cast<__m128i*>(to + i + k),
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + k)));
}

__attribute__((target("avx512f"))) void copy_avx512(std::byte* to,
                                                    const std::byte* from,
                                                    size_t bytes) {
  for (size_t i = 0; i < bytes; i += kLine)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i),
                        _mm512_loadu_si512(from + i));
}

}  // namespace

void stream_copy(void* to, const void* from, size_t bytes) {
  static const bool wide = __builtin_cpu_supports("avx512f");
  auto* t = static_cast<std::byte*>(to);
  const auto* f = static_cast<const std::byte*>(from);
  const auto off = reinterpret_cast<uintptr_t>(t) % kLine;
  const size_t head = off == 0 ? 0 : kLine - off;
  if (bytes < head + kLine) {
    std::memcpy(to, from, bytes);
    return;
  }
  const size_t lines = (bytes - head) / kLine * kLine;
  std::memcpy(t, f, head);
  (wide ? copy_avx512 : copy_sse2)(t + head, f + head, lines);
  std::memcpy(t + head + lines, f + head + lines, bytes - head - lines);
}
#else
void stream_copy(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}
#endif

}  // namespace remesh::memory
