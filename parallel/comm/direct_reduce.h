// DirectReduce: all-reduce and reduce-scatter over point-to-point messages, as
// a state machine that is advanced by polling. Private to parallel/comm.
//
// Method: the vector is split into one part per rank. Every rank sends each
// part directly to its owner; the owner folds the copies in rank order (fold.h)
// and, for an all-reduce, sends the result to all. A rank sends 2 (p-1)/p of
// the vector's bytes, as in a ring, the least possible (Thakur, Rabenseifner
// and Gropp 2005, section 4.5), in two rounds instead of 2 (p-1), and with a
// fixed order of addition, which a ring lacks. The price is p - 1 messages at
// once instead of one. Short vectors are sent complete to every rank, in one
// round.
//
// Parts are split into blocks; two blocks are in progress at a time, so that
// the addition of one overlaps the messages of the other, in bounded scratch.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "parallel/comm/comm.h"
#include "parallel/comm/fold.h"
#include "proto/base/check.h"

namespace remesh::comm {

// An operation that advances when polled.
class StateMachine {
 public:
  virtual ~StateMachine() = default;
  // Does what can be done now; true once finished.
  virtual bool advance() = 0;
};

// Messages in progress together. Buffers must stay until all are complete.
class Batch : public StateMachine {
 public:
  virtual void send(const void* data, size_t bytes, int to, int tag) = 0;
  virtual void recv(void* data, size_t bytes, int from, int tag) = 0;
};

// Reuses the scratch memory of reductions, because fresh pages cost more than
// the sums that use them. Keeps at most kKept released blocks. Threads: one.
class ScratchPool {
 public:
  // Memory that returns to the pool when destroyed; it keeps the pool alive.
  class Block {
   public:
    Block() = default;
    Block(std::shared_ptr<ScratchPool> pool, size_t bytes)
        : pool_(std::move(pool)), memory_(pool_->take(bytes)) {}
    Block(Block&& other) noexcept = default;
    Block& operator=(Block&& other) noexcept {
      std::swap(pool_, other.pool_);
      std::swap(memory_, other.memory_);
      return *this;
    }
    ~Block() {
      if (memory_.data != nullptr) pool_->give_back(std::move(memory_));
    }
    void* data() const { return memory_.data.get(); }
    explicit operator bool() const { return memory_.data != nullptr; }

   private:
    friend class ScratchPool;
    struct Free {
      void operator()(std::byte* p) const {
        ::operator delete[](p, std::align_val_t{kAlignment});
      }
    };
    struct Memory {
      std::unique_ptr<std::byte, Free> data;
      size_t bytes = 0;
    };
    std::shared_ptr<ScratchPool> pool_;
    Memory memory_;
  };

 private:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kKept = 16;

  Block::Memory take(size_t bytes) {
    const auto at = std::ranges::find_if(
        free_, [&](const Block::Memory& m) { return m.bytes >= bytes; });
    if (at != free_.end()) {
      Block::Memory m = std::move(*at);
      free_.erase(at);
      return m;
    }
    auto* p = static_cast<std::byte*>(
        ::operator new[](bytes, std::align_val_t{kAlignment}));
    return {std::unique_ptr<std::byte, Block::Free>(p), bytes};
  }
  // A large block serves small requests too, so drop the smallest.
  void give_back(Block::Memory memory) {
    free_.push_back(std::move(memory));
    if (free_.size() <= kKept) return;
    free_.erase(std::ranges::min_element(
        free_, [](const auto& a, const auto& b) { return a.bytes < b.bytes; }));
  }

  std::vector<Block::Memory> free_;
};

struct Group {
  int rank = 0;
  int size = 1;
  int base_tag = 0;  // four tags from here belong to this operation
  std::function<std::unique_ptr<Batch>()> new_batch;
  std::shared_ptr<ScratchPool> scratch;
};

// Vectors up to this size are sent complete to every rank: the second round
// would cost more than the bytes it saves.
constexpr size_t kWholeBytes = 8 << 10;
// Scratch of one block, shared by the p - 1 copies in it.
constexpr size_t kBlockScratch = 2 << 20;
constexpr size_t kMaxChunk = 256 << 10;
constexpr size_t kMinChunk = 16 << 10;

template <typename T>
class DirectReduce final : public StateMachine {
 public:
  static std::unique_ptr<StateMachine> all_reduce(Group group, Op op, T* data,
                                                  size_t n) {
    auto m = std::unique_ptr<DirectReduce>(new DirectReduce(group, op));
    m->src_ = data;
    m->total_ = n;
    if (n * sizeof(T) <= kWholeBytes) {
      m->part_ = n;
      m->dst_ = data;
    } else {
      const auto p = static_cast<size_t>(group.size);
      m->part_ = m->stride_ = (n + p - 1) / p;
      m->gather_ = data;
      m->dst_ = data + m->begin(group.rank);
    }
    m->start();
    return m;
  }

  // `all` has n elements per rank.
  static std::unique_ptr<StateMachine> reduce_scatter(Group group, Op op,
                                                      const T* all, T* mine,
                                                      size_t n) {
    auto m = std::unique_ptr<DirectReduce>(new DirectReduce(group, op));
    m->src_ = all;
    m->dst_ = mine;
    m->total_ = n * static_cast<size_t>(group.size);
    m->part_ = m->stride_ = n;
    m->start();
    return m;
  }

  bool advance() override {
    bool done = true;
    for (Lane& lane : lanes_) {
      while (lane.state != State::kDone && lane.batch->advance()) step(lane);
      done = done && lane.state == State::kDone;
    }
    return done;
  }

 private:
  enum class State { kReduce, kGather, kDone };
  struct Lane {
    int index = 0;
    size_t block = 0;
    State state = State::kDone;
    std::unique_ptr<Batch> batch;
    ScratchPool::Block scratch;
  };

  DirectReduce(Group group, Op op) : group_(std::move(group)), op_(op) {}

  // Part j of the vector: [begin(j), begin(j) + length(j)).
  size_t begin(int j) const {
    return std::min(total_, static_cast<size_t>(j) * stride_);
  }
  size_t length(int j) const { return std::min(part_, total_ - begin(j)); }
  // Elements of part j that lie in a block, from block * chunk_ on.
  size_t block_length(int j, size_t block) const {
    const size_t at = block * chunk_;
    return at >= length(j) ? 0 : std::min(chunk_, length(j) - at);
  }

  void start() {
    const auto p = static_cast<size_t>(group_.size);
    chunk_ = std::clamp(kBlockScratch / p, kMinChunk, kMaxChunk) / sizeof(T);
    chunk_ = std::max<size_t>(1, std::min(chunk_, part_));
    blocks_ = (part_ + chunk_ - 1) / chunk_;
    for (int i = 0; i < 2; ++i) {
      Lane& lane = lanes_[i];
      lane.index = i;
      lane.block = static_cast<size_t>(i);
      if (lane.block < blocks_) start_block(lane);
    }
    advance();
  }

  void start_block(Lane& lane) {
    if (!lane.scratch) {
      lane.batch = group_.new_batch();
      lane.scratch = ScratchPool::Block(
          group_.scratch,
          chunk_ * static_cast<size_t>(group_.size) * sizeof(T));
    }
    lane.state = State::kReduce;
    const int tag = group_.base_tag + 2 * lane.index;
    const size_t at = lane.block * chunk_;
    const size_t mine = block_length(group_.rank, lane.block);
    // Each rank starts with its next neighbour, so that not all ranks send to
    // the same one at once.
    for (int d = 1; d < group_.size; ++d) {
      const int from = (group_.rank - d + group_.size) % group_.size;
      if (mine > 0)
        lane.batch->recv(slot(lane, from), mine * sizeof(T), from, tag);
    }
    for (int d = 1; d < group_.size; ++d) {
      const int to = (group_.rank + d) % group_.size;
      const size_t len = block_length(to, lane.block);
      if (len > 0)
        lane.batch->send(src_ + begin(to) + at, len * sizeof(T), to, tag);
    }
  }

  // Continues once all messages of the lane's state are complete, including the
  // sends, so this block of the vector may be overwritten.
  void step(Lane& lane) {
    if (lane.state == State::kReduce) {
      fold_block(lane);
      if (gather_ != nullptr) {
        start_gather(lane);
        return;
      }
    }
    lane.block += lanes_.size();
    if (lane.block < blocks_)
      start_block(lane);
    else
      lane.state = State::kDone;
  }

  void fold_block(Lane& lane) {
    const size_t at = lane.block * chunk_;
    std::vector<const T*> parts(static_cast<size_t>(group_.size));
    for (int j = 0; j < group_.size; ++j)
      parts[static_cast<size_t>(j)] =
          j == group_.rank ? src_ + begin(j) + at : slot(lane, j);
    fold<T>(op_, parts, dst_ + at, block_length(group_.rank, lane.block));
  }

  void start_gather(Lane& lane) {
    lane.state = State::kGather;
    const int tag = group_.base_tag + 2 * lane.index + 1;
    const size_t at = lane.block * chunk_;
    const size_t mine = block_length(group_.rank, lane.block);
    for (int d = 1; d < group_.size; ++d) {
      const int from = (group_.rank - d + group_.size) % group_.size;
      const size_t len = block_length(from, lane.block);
      if (len > 0)
        lane.batch->recv(gather_ + begin(from) + at, len * sizeof(T), from,
                         tag);
    }
    for (int d = 1; d < group_.size; ++d) {
      const int to = (group_.rank + d) % group_.size;
      if (mine > 0) lane.batch->send(dst_ + at, mine * sizeof(T), to, tag);
    }
  }

  T* slot(Lane& lane, int j) const {
    return static_cast<T*>(lane.scratch.data()) +
           static_cast<size_t>(j) * chunk_;
  }

  Group group_;
  Op op_;
  const T* src_ = nullptr;
  T* dst_ = nullptr;     // this rank's part of the result
  T* gather_ = nullptr;  // the complete result, if wanted
  size_t total_ = 0;     // elements of the vector
  size_t part_ = 0;      // of the longest part
  size_t stride_ = 0;    // between parts; 0: each part is the full vector
  size_t chunk_ = 0;     // of one part in one block
  size_t blocks_ = 0;
  std::array<Lane, 2> lanes_;
};

}  // namespace remesh::comm
