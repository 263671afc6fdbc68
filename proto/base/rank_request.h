// What a worker daemon asks of a rank, in shared memory (worker/board): bits.
#pragma once

#include <cstdint>

namespace remesh {

inline constexpr uint32_t kRequestStop = 1;   // save and stop at the next step
                                              // boundary, if saving works
inline constexpr uint32_t kRequestForce = 2;  // kRequestStop: even if it fails
// With kRequestStop: save nothing, the state stays in shared memory.
inline constexpr uint32_t kRequestHandoff = 4;

}  // namespace remesh
