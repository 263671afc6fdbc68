#include "proto/base/xxh3.h"

#define XXH_STATIC_LINKING_ONLY  // for the size of XXH3_state_t
#include <xxhash.h>
#ifdef __x86_64__
#include <xxh_x86dispatch.h>  // selects AVX2 or AVX-512 at run time
#endif

namespace remesh {
namespace {

Xxh128 canonical(XXH128_hash_t hash) {
  Xxh128 out;
  static_assert(sizeof(XXH128_canonical_t) == sizeof out);
  XXH128_canonicalFromHash(reinterpret_cast<XXH128_canonical_t*>(out.data()),
                           hash);
  return out;
}

}  // namespace

struct Xxh3Stream::State {
  XXH3_state_t xxh;
};

uint64_t xxh3(const void* data, size_t bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(data, bytes, seed);
}

Xxh128 xxh3_128(std::span<const std::byte> bytes) {
  return canonical(XXH3_128bits(bytes.data(), bytes.size()));
}

std::string hex(const Xxh128& hash) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : hash) {
    text += kDigits[std::to_integer<unsigned>(byte >> 4)];
    text += kDigits[std::to_integer<unsigned>(byte & std::byte{15})];
  }
  return text;
}

bool is_hex_hash(std::string_view text) {
  return text.size() == 32 &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

Xxh3Stream::Xxh3Stream() : state_(std::make_unique<State>()) { reset(); }
Xxh3Stream::~Xxh3Stream() = default;
Xxh3Stream::Xxh3Stream(Xxh3Stream&&) noexcept = default;
Xxh3Stream& Xxh3Stream::operator=(Xxh3Stream&&) noexcept = default;

// The state of both widths is the same.
void Xxh3Stream::reset() { (void)XXH3_64bits_reset(&state_->xxh); }

void Xxh3Stream::add(const void* data, size_t bytes) {
  if (bytes > 0) (void)XXH3_64bits_update(&state_->xxh, data, bytes);
}

uint64_t Xxh3Stream::digest() const { return XXH3_64bits_digest(&state_->xxh); }

Xxh128 Xxh3Stream::digest_128() const {
  return canonical(XXH3_128bits_digest(&state_->xxh));
}

}  // namespace remesh
