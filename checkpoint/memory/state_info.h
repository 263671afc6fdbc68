// StateInfo describes a rank's state in memory: its rank, step and sharding. It
// is written beside the state when it is committed (segment.h), and travels
// with it when it is copied. Pure.
//
// The encoding is a list of 64-bit words, the same on every host of a cluster
// (little-endian, two's complement); decode() validates everything.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "parallel/geometry/sharding.h"
#include "parallel/geometry/state_vectors.h"

namespace remesh::memory {

// How long the states of a job stay in shared memory after their last user.
inline constexpr int64_t kStateKeptS = 600;
// The worker of a job uses them for this long after the last word of its
// coordinator. What nobody used for this long is removed in any case.
inline constexpr int64_t kStateUnclaimedS = 12 * 3600;

// xxh3 of each vector.
using ContentHash = std::array<uint64_t, geometry::kNumStateVectors>;

struct StateInfo {
  int64_t step = 0;        // updates made
  int64_t generation = 0;  // the one that made or restored it
  int rank = 0;            // of that generation's mesh
  geometry::Sharding sharding;
  uint64_t model = 0;    // geometry::model_id
  int64_t elements = 0;  // of each vector
  int64_t tokens = 0;    // data position: tokens trained on so far
  int64_t sequences = 0;
  bool replica = false;  // a copy, kept for a rank of another worker
  std::optional<ContentHash> content;  // of a replica
  friend bool operator==(const StateInfo&, const StateInfo&) = default;
};

// "step 7 of generation 2, rank 1 of dp2".
std::string to_string(const StateInfo& info);

// The most words that encode() returns: 1024 stages.
constexpr size_t kMaxInfoWords = 544;
// REQUIRES: at most 1024 virtual stages, each bound below 2^31.
std::vector<uint64_t> encode(const StateInfo& info);
// Corrupt, naming the field, when the words are not a valid encoding.
Result<StateInfo> decode(std::span<const uint64_t> words);

}  // namespace remesh::memory
