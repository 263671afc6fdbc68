#include "proto/base/keyed_hash.h"

#include <sodium.h>

#include <array>
#include <cstring>

#include "proto/base/check.h"

namespace remesh {
namespace {

const unsigned char* bytes(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

}  // namespace

std::string new_secret() {
  CHECK(sodium_init() >= 0);
  std::string out(kSecretBytes, '\0');
  randombytes_buf(out.data(), out.size());
  return out;
}

uint64_t keyed_hash(std::string_view secret, std::string_view text) {
  std::array<unsigned char, crypto_generichash_BYTES_MIN> hash{};
  CHECK(crypto_generichash(hash.data(), hash.size(), bytes(text), text.size(),
                           bytes(secret), secret.size()) == 0);
  uint64_t out = 0;
  std::memcpy(&out, hash.data(), sizeof(out));
  return out;
}

}  // namespace remesh
