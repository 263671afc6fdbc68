// Included once by each xxh3_*.cc, which is compiled for one kind of processor
// and names its functions by REMESH_XXH3. No C++ library here: a template
// compiled for a newer processor must not be the one that all others link.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#define REMESH_XXH3_CAT_(a, b) a##b
#define REMESH_XXH3_CAT(a, b) REMESH_XXH3_CAT_(a, b)
#define REMESH_XXH3_NAME(what) REMESH_XXH3_CAT(REMESH_XXH3, what)

namespace remesh::memory {

uint64_t REMESH_XXH3_NAME(_once)(const void* data, size_t bytes,
                                 uint64_t seed) {
  return XXH3_64bits_withSeed(data, bytes, seed);
}
void REMESH_XXH3_NAME(_add)(void* state, const void* data, size_t bytes) {
  (void)XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, bytes);
}
uint64_t REMESH_XXH3_NAME(_digest)(const void* state) {
  return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state));
}
void REMESH_XXH3_NAME(_once128)(const void* data, size_t bytes, void* out) {
  XXH128_canonicalFromHash(static_cast<XXH128_canonical_t*>(out),
                           XXH3_128bits(data, bytes));
}
void REMESH_XXH3_NAME(_digest128)(const void* state, void* out) {
  XXH128_canonicalFromHash(
      static_cast<XXH128_canonical_t*>(out),
      XXH3_128bits_digest(static_cast<const XXH3_state_t*>(state)));
}

}  // namespace remesh::memory
