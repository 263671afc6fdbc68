// WeightStore: brings weights from the ranks that update them to the stages
// that compute with them.
//
//   nothing sharded (shard group of 1): a unit's state is its weights
//   ZeRO 1, 2: every rank keeps all weights of its shard; after an update each
//     rank's share is gathered, once a step
//   ZeRO 3: a block's weights are gathered before use, one block ahead of the
//     computation, into one of two buffers a chunk, and overwritten after it.
//     Embedding and head are gathered once a step and stay until the update,
//     as the root module does in FSDP (Zhao et al. 2023, section 3.2).
//
// What is gathered is fp32: a stage reads norms, the embedding and, in fp32,
// every matrix from there.
//
// With ZeRO 3 all ranks of the shard group must gather the same units in the
// same order. So the order is laid down beforehand (begin()), and a rank that
// has no microbatch where others have one joins in (join()).
//
// Ownership: owns the gathered copies; borrows everything else. Threads: one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "parallel/comm/comm.h"
#include "parallel/geometry/zero.h"
#include "worker/engine/flat_buffer.h"
#include "worker/engine/units.h"
#include "worker/model/stage.h"

namespace remesh::engine {

class WeightStore {
 public:
  // `master`: the rank's state vector of weights (ZeroPlan::state_offset), to
  // be read until set_master() names another.
  static Result<std::unique_ptr<WeightStore>> make(
      const geometry::ShardTable& shard, const geometry::ZeroPlan& zero,
      kernels::Backend& backend, std::span<const float> master);

  // `gather`: the shard group, used by nobody else meanwhile; nullptr when it
  // has one rank. `stages`: by chunk.
  void connect(comm::Comm* gather, std::vector<model::Stage*> stages);

  // Blocks share weight memory (StageOptions::block_buffers).
  bool streams() const { return streams_; }
  static constexpr int kBlockBuffers = 2;

  // --- after an update or restore ---
  // Weights are read from here from now on, an update's while it is made; what
  // was loaded or gathered before stays.
  void set_master(std::span<const float> master);
  // The state of unit u is final: loads it, or starts gathering it.
  void updated(size_t unit);
  // All are. Returns when every stage that keeps its weights has them.
  void update_done(const std::function<void()>& tick);

  // --- passes ---
  // The units of the blocks that the passes to come need, in order, the same
  // on all ranks of the shard group. Starts gathering. REQUIRES: the passes of
  // the last begin() are done.
  void begin(std::vector<int> blocks);
  void need(int unit);     // UnitHooks::need
  void release(int unit);  // UnitHooks::release
  void join(int unit);     // takes part in gathering, without computing
  // Lets what is under way move on.
  void poll();

  // Seconds spent waiting for weights so far.
  double waited_s() const { return waited_s_; }
  uint64_t bytes() const;

 private:
  // Of a block's set, or of a unit that stays.
  struct Buffer {
    FlatBuffer memory;
    int unit = -1;  // what it holds or is being filled with
    bool loaded = false;
    bool in_use = false;
    comm::RequestPtr request;
  };

  WeightStore(const geometry::ShardTable& shard, const geometry::ZeroPlan& zero,
              kernels::Backend& backend, std::span<const float> master);
  Status allocate();
  bool is_block(int unit) const;
  Buffer& buffer(int unit) {
    return buffers_[buffer_of_[static_cast<size_t>(unit)]];
  }
  std::span<const float> master(size_t unit) const;
  // Starts to gather unit u at `to`, length(u) elements.
  comm::RequestPtr start_gather(size_t unit, float* to);
  void start(int unit);
  void start_ahead();
  void obtain(int unit);  // waits until it is gathered
  void load(size_t unit, const float* weights);

  const geometry::ShardTable& shard_;
  const geometry::ZeroPlan& zero_;
  kernels::Backend& backend_;
  std::span<const float> master_;
  const UnitLayout layout_;
  const bool sharded_, streams_;
  comm::Comm* gather_ = nullptr;
  std::vector<model::Stage*> stages_;

  FlatBuffer full_;  // ZeRO 1 and 2, in layout_
  std::vector<comm::RequestPtr> gathers_;
  std::vector<size_t> buffer_of_;  // ZeRO 3, by unit
  std::vector<Buffer> buffers_;
  std::vector<int> plan_;
  size_t next_ = 0;  // in plan_, what need() will be called with
  double waited_s_ = 0;
};

}  // namespace remesh::engine
