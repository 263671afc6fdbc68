#include "checkpoint/memory/xxh3.h"

// For the state's type and its first value, which all builds share.
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

namespace remesh::memory {

#define REMESH_XXH3_BUILD(build)                                        \
  uint64_t build##_once(const void* data, size_t bytes, uint64_t seed); \
  void build##_add(void* state, const void* data, size_t bytes);        \
  uint64_t build##_digest(const void* state);                           \
  void build##_once128(const void* data, size_t bytes, void* out);      \
  void build##_digest128(const void* state, void* out)
REMESH_XXH3_BUILD(xxh3_base);
#ifdef REMESH_XXH3_X86
REMESH_XXH3_BUILD(xxh3_avx2);
REMESH_XXH3_BUILD(xxh3_avx512);
#endif
#undef REMESH_XXH3_BUILD

namespace {

struct Build {
  decltype(&xxh3_base_once) once;
  decltype(&xxh3_base_add) add;
  decltype(&xxh3_base_digest) digest;
  decltype(&xxh3_base_once128) once128;
  decltype(&xxh3_base_digest128) digest128;
};

const Build& best() {
#define REMESH_XXH3_TABLE(build)                                \
  {                                                             \
    build##_once, build##_add, build##_digest, build##_once128, \
        build##_digest128                                       \
  }
  static constexpr Build kBase = REMESH_XXH3_TABLE(xxh3_base);
#ifdef REMESH_XXH3_X86
  static constexpr Build kAvx2 = REMESH_XXH3_TABLE(xxh3_avx2);
  static constexpr Build kAvx512 = REMESH_XXH3_TABLE(xxh3_avx512);
  if (__builtin_cpu_supports("avx512f") != 0) return kAvx512;
  if (__builtin_cpu_supports("avx2") != 0) return kAvx2;
#endif
#undef REMESH_XXH3_TABLE
  return kBase;
}

}  // namespace

struct Xxh3Stream::State {
  XXH3_state_t xxh;
};

uint64_t xxh3(const void* data, size_t bytes, uint64_t seed) {
  return best().once(data, bytes, seed);
}

Xxh128 xxh3_128(const void* data, size_t bytes) {
  Xxh128 sum;
  static_assert(sizeof(XXH128_canonical_t) == sizeof sum);
  best().once128(data, bytes, sum.data());
  return sum;
}

Xxh3Stream::Xxh3Stream() : state_(new State) { reset(); }
Xxh3Stream::~Xxh3Stream() = default;

// The same for either width.
void Xxh3Stream::reset() { (void)XXH3_64bits_reset(&state_->xxh); }

void Xxh3Stream::add(const void* data, size_t bytes) {
  best().add(&state_->xxh, data, bytes);
}

uint64_t Xxh3Stream::digest() const { return best().digest(&state_->xxh); }

Xxh128 Xxh3Stream::digest_128() const {
  Xxh128 sum;
  best().digest128(&state_->xxh, sum.data());
  return sum;
}

}  // namespace remesh::memory
