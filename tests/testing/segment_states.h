// States in shared memory whose every element follows from step, rank and
// place, so that a torn or mixed one is found.
#pragma once

#include "checkpoint/memory/segment.h"
#include "tests/testing/expect.h"

namespace remesh::memory {

inline StateInfo info_of(int64_t step, int64_t elements, int rank = 1) {
  return {.step = step,
          .generation = 3,
          .rank = rank,
          .sharding = {.layout = {.dp = 2, .pp = 2},
                       .bounds = {0, 1, 3},
                       .chunks = 1,
                       .zero = {.stage = 2, .shard_group = 1}},
          .model = 77,
          .elements = elements,
          .tokens = step * 1000,
          .sequences = step * 10};
}

inline float element_of(const StateInfo& info, size_t vector, size_t i) {
  return static_cast<float>(info.rank * 100000 + info.step * 1000 +
                            static_cast<int64_t>(vector * 300) +
                            static_cast<int64_t>(i % 251));
}

inline void fill(const geometry::StateView& s, const StateInfo& info) {
  for (size_t v = 0; v < geometry::kNumStateVectors; ++v)
    for (size_t i = 0; i < s[v].size(); ++i) s[v][i] = element_of(info, v, i);
}

// Writes the state of the next step into the other buffer.
inline StateSegment::Committed update(StateSegment& s, const StateInfo& info) {
  const int to = static_cast<int>(info.step % 2);
  s.begin(to);
  fill(s.write(to, info.elements), info);
  return s.commit(info);
}

// The newest step, or -1. Every state must be one of that rank as update()
// writes it, and have the contents that its hashes say.
inline int64_t newest_step(const StateSegment& s, int rank = 1) {
  const auto c = s.contents();
  EXPECT_TRUE(c.damaged.empty()) << c.damaged[0];
  for (const auto& state : c.states) {
    EXPECT_EQ(state.info.rank, rank);
    EXPECT_OK(s.verify_content(state));
    const auto v = s.read(state.buffer, state.info.elements);
    for (size_t k = 0; k < geometry::kNumStateVectors; ++k)
      for (size_t i = 0; i < v[k].size(); ++i)
        if (v[k][i] != element_of(state.info, k, i)) {
          ADD_FAILURE() << "step " << state.info.step << " is torn";
          return -1;
        }
  }
  return c.states.empty() ? -1 : c.states[0].info.step;
}

}  // namespace remesh::memory
