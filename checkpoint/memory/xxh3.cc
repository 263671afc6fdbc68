#include "checkpoint/memory/xxh3.h"

// For the state's type and its first value, which all builds share.
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

namespace remesh::memory {

uint64_t xxh3_base_once(const void* data, size_t bytes, uint64_t seed);
void xxh3_base_add(void* state, const void* data, size_t bytes);
uint64_t xxh3_base_digest(const void* state);
uint64_t xxh3_avx2_once(const void* data, size_t bytes, uint64_t seed);
void xxh3_avx2_add(void* state, const void* data, size_t bytes);
uint64_t xxh3_avx2_digest(const void* state);

namespace {

bool has_avx2() {
#ifdef REMESH_XXH3_AVX2
  return __builtin_cpu_supports("avx2") != 0;
#else
  return false;
#endif
}

}  // namespace

#ifndef REMESH_XXH3_AVX2
#define xxh3_avx2_once xxh3_base_once
#define xxh3_avx2_add xxh3_base_add
#define xxh3_avx2_digest xxh3_base_digest
#endif

struct Xxh3Stream::State {
  XXH3_state_t xxh;
};

uint64_t xxh3(const void* data, size_t bytes, uint64_t seed) {
  return has_avx2() ? xxh3_avx2_once(data, bytes, seed)
                    : xxh3_base_once(data, bytes, seed);
}

Xxh3Stream::Xxh3Stream() : state_(new State) { reset(); }
Xxh3Stream::~Xxh3Stream() = default;

void Xxh3Stream::reset() { (void)XXH3_64bits_reset(&state_->xxh); }

void Xxh3Stream::add(const void* data, size_t bytes) {
  if (has_avx2())
    xxh3_avx2_add(&state_->xxh, data, bytes);
  else
    xxh3_base_add(&state_->xxh, data, bytes);
}

uint64_t Xxh3Stream::digest() const {
  return has_avx2() ? xxh3_avx2_digest(&state_->xxh)
                    : xxh3_base_digest(&state_->xxh);
}

}  // namespace remesh::memory
