#include "checkpoint/store/fletcher32.h"

#include <cstring>

#include "proto/base/check.h"

namespace remesh::store {
namespace {

// Both sums are modulo 65535 in one's complement: zero only when all was zero.
uint32_t fold(uint64_t sum) {
  return sum == 0 ? 0 : static_cast<uint32_t>((sum - 1) % 65535 + 1);
}

}  // namespace

// Over big-endian 16-bit words w: sum1 = sum of w, sum2 = sum of sum1 after
// each word. Taken kBlock words at a time the second is kBlock * sum1 + a
// weighted sum, which the compiler vectorises; 64 bits hold it for 4 Mi words.
uint32_t fletcher32(std::span<const std::byte> bytes) {
  constexpr size_t kBlock = 64;
  CHECK(bytes.size() % 2 == 0 && bytes.size() <= size_t{8} << 20);
  const size_t num_words = bytes.size() / 2;
  const auto word = [&](size_t i) {
    uint16_t w = 0;
    std::memcpy(&w, bytes.data() + 2 * i, sizeof w);
    return static_cast<uint32_t>(static_cast<uint16_t>(w << 8 | w >> 8));
  };
  uint64_t sum1 = 0, sum2 = 0;
  size_t i = 0;
  for (; i + kBlock <= num_words; i += kBlock) {
    uint32_t plain = 0, weighted = 0;
    for (size_t k = 0; k < kBlock; ++k) {
      const uint32_t w = word(i + k);
      plain += w;
      weighted += w * static_cast<uint32_t>(kBlock - k);
    }
    sum2 += kBlock * sum1 + weighted;
    sum1 += plain;
  }
  for (; i < num_words; ++i) {
    sum1 += word(i);
    sum2 += sum1;
  }
  return fold(sum2) << 16 | fold(sum1);
}

}  // namespace remesh::store
