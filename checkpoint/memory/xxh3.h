// xxh3 (Collet), at the speed of the processor at hand: Debian's libxxhash is
// built for any x86-64 and takes two to three times as long. The same values as
// XXH3_64bits and XXH3_128bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace remesh::memory {

uint64_t xxh3(const void* data, size_t bytes, uint64_t seed = 0);
// Canonical (big-endian), as `xxhsum -H2` prints it.
using Xxh128 = std::array<std::byte, 16>;
Xxh128 xxh3_128(const void* data, size_t bytes);

// The hash of bytes that come in pieces.
class Xxh3Stream {
 public:
  Xxh3Stream();
  ~Xxh3Stream();
  void reset();
  void add(const void* data, size_t bytes);
  uint64_t digest() const;
  Xxh128 digest_128() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace remesh::memory
