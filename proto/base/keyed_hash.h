// A keyed hash (BLAKE2b, RFC 7693), and secrets for it. The hash of a text
// cannot be predicted without the secret, even by whoever has seen those of
// other texts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace remesh {

inline constexpr size_t kSecretBytes = 32;
std::string new_secret();  // kSecretBytes random bytes
// The first 64 bits of the hash. secret: at most 64 bytes; if it is empty, the
// hash has no key.
uint64_t keyed_hash(std::string_view secret, std::string_view text);

}  // namespace remesh
