// Sampler: the window of the training data that is sequence i of step s.
//
// A pure function of (seed, s, i), the number of windows and the global batch
// size (both constants of a job). It does not depend on the mesh, the rank or
// earlier failures, and keeps no list in memory.
//
// The members of a mixture are mixed by weight: member k takes the share w_k /
// (w_k + w_k+1 + ...) of the numbers that members 0 to k - 1 leave, evenly: of
// the first n of them floor(n * share + 1/2), with the share rounded to 1 /
// 2^32. The numbers that it takes count its own sequences.
//
// Windows do not overlap: window w has the tokens [w * T, (w + 1) * T) as input
// and the same range shifted by one as targets. The sequences of a run are
// numbered n = offset + s * global_batch + i. Sequence n of a member is window
// permutation(epoch = n / num_windows)[n % num_windows]: each epoch uses every
// window exactly once, in an order of its own, for any batch size.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "proto/base/status.h"

namespace remesh::data {

// Number of windows of `seq_len` tokens, each followed by its last target, in a
// split of `num_tokens`. REQUIRES: seq_len >= 1, num_tokens >= 0.
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
  struct MixtureMember {
    int64_t num_tokens = 0;
    double weight = 1;  // 0: it has no sequence
  };
  struct Sequence {
    int64_t epoch = 0;   // pass over the member, from 0
    int64_t window = 0;  // 0 .. num_windows - 1
    size_t member = 0;
    friend bool operator==(const Sequence&, const Sequence&) = default;
  };

  // Fails if no weight is above 0, a member of such a weight has no complete
  // window (naming tokens and seq_len), or a size is below 1.
  static Result<Sampler> make(uint64_t seed,
                              const std::vector<MixtureMember>& members,
                              int64_t seq_len, int64_t global_batch,
                              int64_t offset = 0);

  // Sequence i of step s, counted from 0.
  // REQUIRES: s >= 0, offset + s * global_batch() >= 0,
  // 0 <= i < global_batch().
  Sequence at(int64_t s, int64_t i) const;

  int64_t global_batch() const { return global_batch_; }

 private:
  struct Stream {
    uint64_t key = 0;
    int64_t windows = 0;
    uint64_t share = 0;  // of what the streams before leave, times 2^32
  };
  Sampler(std::vector<Stream> streams, int64_t global_batch, int64_t offset)
      : streams_(std::move(streams)),
        global_batch_(global_batch),
        offset_(offset) {}
  std::vector<Stream> streams_;
  int64_t global_batch_;
  int64_t offset_;
};

// The windows of a validation: `count` of them, or all if there are fewer,
// evenly spread over the split, in ascending order.
// REQUIRES: num_windows >= 0, count >= 0.
std::vector<int64_t> validation_windows(int64_t num_windows, int64_t count);

}  // namespace remesh::data
