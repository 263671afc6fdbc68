// XXH3 (Collet), 64 and 128 bits wide, with the widest vector instructions of
// the processor at hand. Not cryptographic: it detects damage, not forgery.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace remesh {

uint64_t xxh3(const void* data, size_t bytes, uint64_t seed = 0);
// Canonical (big-endian), as `xxhsum -H2` prints it.
using Xxh128 = std::array<std::byte, 16>;
Xxh128 xxh3_128(std::span<const std::byte> bytes);
// 32 lower-case hexadecimal digits.
std::string hex(const Xxh128& hash);
bool is_hex_hash(std::string_view text);  // has that form

// The hash of a stream, 64 or 128 bits wide. Threads: one at a time.
class Xxh3Stream {
 public:
  Xxh3Stream();
  ~Xxh3Stream();
  Xxh3Stream(Xxh3Stream&&) noexcept;
  Xxh3Stream& operator=(Xxh3Stream&&) noexcept;
  void reset();
  void add(const void* data, size_t bytes);
  uint64_t digest() const;
  Xxh128 digest_128() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace remesh
