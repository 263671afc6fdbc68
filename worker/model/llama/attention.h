// Attention of one layer over all tokens of its sequences, also those on other
// ranks. Private to this folder.
//
// With context parallelism keys and values circulate in the ring of ranks (Liu
// et al. 2023): in each step a rank attends to the keys it holds while it sends
// them on and receives the next. In backward the gradients of keys and values
// follow one step behind, every rank adds its part, and they end where they
// began. Each rank's tokens are two pieces (context_positions()), so that with
// a causal mask all ranks have the same work in every step: two full blocks of
// piece by piece, or one full and two half ones in the first step.
//
// With a window (Beltagy et al. 2020) a rank skips the blocks that none of its
// queries sees.
//
// Documents of a sequence do not see each other. Their positions are those of
// the sequence: the rotary embedding depends on differences alone.
//
// With a cache a sequence is continued: its new keys and values are added to
// those of earlier tokens, and the new queries attend to all of them.
#pragma once

#include <vector>

#include "parallel/comm/comm.h"
#include "worker/kernels/backend.h"
#include "worker/model/llama/buffers.h"

namespace remesh::model {

// Keys and values of a layer, (token, 2 kv), and how many tokens there are
// before those of the next forward().
struct KeyCache {
  void* kv = nullptr;
  int64_t length = 0;
};

class Attention {
 public:
  // comm: nullptr without context parallelism.
  // window: tokens that a token attends to, itself included; 0: all.
  Attention(const Sizes& sizes, kernels::Dtype d, kernels::Backend& backend,
            comm::Comm* comm, int64_t window)
      : sizes_(sizes), d_(d), backend_(backend), comm_(comm), window_(window) {}

  // What the following forward() continues; without kv: nothing.
  void continue_from(const KeyCache& cache) { cache_ = cache; }

  // From a[kQkv] to a[kO] and a[kLse].
  void forward(const Rows& rows, const BlockParts& a, const Scratch& scratch);
  // From scratch.dattention, the gradient of a[kO], to a[kDqkv].
  void backward(const Rows& rows, const BlockParts& a, const Scratch& scratch);

 private:
  // A block of a ring step: a piece of this rank's queries with a piece of the
  // current keys, or of a document what is in both.
  struct Pair {
    kernels::AttentionSegment segment;
    int64_t q_token = 0, k_token = 0;  // where they begin in the rows
    int64_t lse = 0;                   // of the first query and head
    bool first = false;                // block that these queries see
  };
  std::vector<Pair> pairs(const Rows& rows, int step) const;
  // Appends a pair's documents.
  void add_documents(const Rows& rows, const Pair& pair,
                     std::vector<Pair>* out) const;
  size_t kv_bytes(const Rows& rows, kernels::Dtype d) const {
    return static_cast<size_t>(rows.N * 2 * sizes_.kv_dim()) *
           kernels::dtype_size(d);
  }

  // All of the rows' sequences, with the keys where a[kQkv] has them.
  kernels::AttentionSegment whole(const Rows& rows) const;
  void extend(const Rows& rows, const BlockParts& a, const Scratch& scratch);
  void ring_forward(const Rows& rows, const BlockParts& a,
                    const Scratch& scratch);
  void ring_backward(const Rows& rows, const BlockParts& a,
                     const Scratch& scratch);
  void pack(const Rows& rows, const BlockParts& a, void* kv);
  void unpack_gradients(const Rows& rows, const float* dq, const float* dkv,
                        void* dqkv);
  comm::RequestPtr send(const void* data, size_t bytes, int tag);
  comm::RequestPtr receive(void* data, size_t bytes, int tag);

  const Sizes& sizes_;
  kernels::Dtype d_;
  kernels::Backend& backend_;
  comm::Comm* comm_;
  int64_t window_;
  KeyCache cache_;
};

}  // namespace remesh::model
