// A keyed hash (BLAKE2b, RFC 7693) and secrets for it: whoever does not have
// the secret cannot find the hash of a text that he has not seen one of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace remesh {

inline constexpr size_t kSecretBytes = 32;
std::string new_secret();  // kSecretBytes random bytes
// secret: at most 64 bytes; without one the hash has no key.
uint64_t keyed_hash(std::string_view secret, std::string_view text);

}  // namespace remesh
