// Counter-based random numbers (Philox 4x32-10, Salmon et al., SC'11, from the
// Random123 library): pure functions of key and counter, the same on every
// machine and mesh.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace remesh {

// Four 32-bit words for (key, counter).
std::array<uint32_t, 4> philox(uint64_t key, uint64_t counter_hi,
                               uint64_t counter_lo);

// 64 bits for (key, stream, index).
uint64_t random_u64(uint64_t key, uint64_t stream, uint64_t index);

// A standard normal number: element `index` of stream `stream` (Box-Muller).
float random_normal(uint64_t key, uint64_t stream, uint64_t index);

// Elements index .. index + out.size() - 1 of random_normal(), bit for bit, in
// half the time: one Philox block yields two.
void random_normals(uint64_t key, uint64_t stream, uint64_t index,
                    std::span<float> out);

// 64-bit hash of a text (XXH3), such as a parameter's name.
uint64_t hash64(std::string_view text);

}  // namespace remesh
