// Sampler: which window of the training data is sequence i of step s.
//
// Pure: the answer is a function of (seed, s, i), the number of windows and
// the global batch size (both constants of a job), and of nothing else; not
// of the mesh, the rank, or what failed before. There is no list in memory.
//
// Windows do not overlap: window w is tokens [w * T, (w + 1) * T) as input
// and the same one token later as targets. All sequences of a run are
// numbered n = s * global_batch + i; sequence n is window
// permutation(pass = n / num_windows)[n % num_windows]: every window exactly
// once a pass, in another order each pass, whatever the batch size.
#pragma once

#include <cstdint>
#include <vector>

#include "proto/base/status.h"

namespace remesh::data {

// Windows of `seq_len` tokens, each with one more token as the last target,
// in a split of `num_tokens`. REQUIRES: seq_len >= 1, num_tokens >= 0.
int64_t num_windows(int64_t num_tokens, int64_t seq_len);

// Element `index` of a pseudo-random permutation of 0 .. n - 1 chosen by
// (key, tweak): a Feistel network over Philox on the next even number of
// bits, walked along its cycle until it falls below n (Black and Rogaway,
// "Ciphers with arbitrary finite domains", CT-RSA 2002). Constant memory,
// expected time constant. REQUIRES: index < n <= 2^62.
uint64_t keyed_permutation(uint64_t key, uint64_t tweak, uint64_t n,
                           uint64_t index);

class Sampler {
 public:
  struct Sequence {
    int64_t pass = 0;    // from 0
    int64_t window = 0;  // 0 .. num_windows - 1
    friend bool operator==(const Sequence&, const Sequence&) = default;
  };

  // `step` is counted from 0 in at(). Fails when the split has no whole
  // window (naming tokens and seq_len) or a size is below 1.
  static Result<Sampler> make(uint64_t seed, int64_t num_tokens,
                              int64_t seq_len, int64_t global_batch);

  // Sequence i of step s. REQUIRES: s >= 0, 0 <= i < global_batch().
  Sequence at(int64_t s, int64_t i) const;

  int64_t windows() const { return num_windows_; }
  int64_t global_batch() const { return global_batch_; }

 private:
  Sampler(uint64_t key, int64_t num_windows, int64_t global_batch)
      : key_(key), num_windows_(num_windows), global_batch_(global_batch) {}
  uint64_t key_;
  int64_t num_windows_;
  int64_t global_batch_;
};

// The windows of a validation: `count` of them (all, when there are fewer),
// evenly spread over the split, ascending, the same every time.
// REQUIRES: num_windows >= 0, count >= 0.
std::vector<int64_t> validation_windows(int64_t num_windows, int64_t count);

}  // namespace remesh::data
