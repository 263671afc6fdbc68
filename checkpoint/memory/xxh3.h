// xxh3 (Collet), 64 bits, at the speed of the processor at hand: Debian's
// libxxhash is built for any x86-64 and takes two to three times as long. The
// same values as XXH3_64bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace remesh::memory {

uint64_t xxh3(const void* data, size_t bytes, uint64_t seed = 0);

// The hash of bytes that come in pieces.
class Xxh3Stream {
 public:
  Xxh3Stream();
  ~Xxh3Stream();
  void reset();
  void add(const void* data, size_t bytes);
  uint64_t digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace remesh::memory
