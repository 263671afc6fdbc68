// What a rank tells its worker daemon about itself and what the daemon asks of
// it, in shared memory (worker/board).
#pragma once

#include <cstdint>

namespace remesh {

// In the order of RankStatus.Phase.
enum class RankPhase : uint32_t {
  kStarting = 0,  // before MPI_Init
  kConnecting,    // in MPI_Init
  kRestoring,     // reading or making the initial state
  kCompute,       // forward/backward of a microbatch
  kReduce,        // gradient reduction
  kUpdate,        // norm, clip, optimizer
  kValidate,
  kCheckpoint,  // waiting for a checkpoint (saving at a stop)
  kStopping,    // finalizing
  kEnded,
};

// The daemon's request to a rank: bits.
inline constexpr uint32_t kRequestStop = 1;   // save and stop at the next step
                                              // boundary, if saving works
inline constexpr uint32_t kRequestForce = 2;  // kRequestStop: even if it fails
// With kRequestStop: save nothing, the state stays in shared memory.
inline constexpr uint32_t kRequestHandoff = 4;

}  // namespace remesh
