// Counter-based random numbers (Philox 4x32-10, Salmon et al., SC'11, by the
// Random123 library): a pure function of key and counter, the same on every
// machine and mesh. Nothing here has state.
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

// Standard normal number of element `index` of stream `stream` (Box-Muller).
float random_normal(uint64_t key, uint64_t stream, uint64_t index);

// Elements index .. index + out.size() - 1 of random_normal, the same bits, in
// half the time: two come from one block.
void random_normals(uint64_t key, uint64_t stream, uint64_t index,
                    std::span<float> out);

// 64-bit key of a text (xxh3), e.g. a parameter's name.
uint64_t hash64(std::string_view text);

}  // namespace remesh
