// WeightStore: brings weights from the ranks that update them to the stages
// that compute with them.
//
//   nothing sharded (shard group of 1): the state holds the weights
//   ZeRO 1, 2: every rank keeps all weights of its shard; each rank's share is
//     gathered once per step, after the update
//   ZeRO 3: a block's weights are gathered before use, one block ahead of the
//     computation, into one of two buffers per chunk, and overwritten after it.
//     Embedding and head are gathered once per step and stay until the update,
//     as the root module does in FSDP (Zhao et al. 2023, section 3.2).
//
// The gathered copies are fp32: a stage reads norms, the embedding and, when it
// computes in fp32, every matrix from them.
//
// With ZeRO 3 all ranks of the shard group must gather the same units in the
// same order. begin() fixes that order in advance, and a rank without a
// microbatch takes part in gathering by join().
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
  // `master`: the rank's state vector of weights (ZeroPlan::state_offset), read
  // until set_master() names another. Adds the seconds it waits for weights to
  // `waited_s`.
  static Result<std::unique_ptr<WeightStore>> make(
      const geometry::ShardTable& shard, const geometry::ZeroPlan& zero,
      kernels::Backend& backend, std::span<const float> master,
      double& waited_s);

  // `gather`: the shard group, not used by anyone else; nullptr when it has one
  // rank. `stages`: by chunk.
  void connect(comm::Comm* gather, std::vector<model::Stage*> stages);

  // Blocks share weight memory (StageOptions::block_buffers).
  bool streams() const { return streams_; }
  static constexpr int kBlockBuffers = 2;

  // --- after an update or restore ---
  // Reads weights from here from now on, also while an update writes them; what
  // is already loaded or gathered stays.
  void set_master(std::span<const float> master);
  // The state of unit u is final: loads it, or starts gathering it.
  void updated(size_t unit);
  // All units are final. Returns when every stage has the weights it keeps.
  void update_done(const std::function<void()>& tick);

  // --- passes ---
  // The units of the blocks that the next passes need, in order, the same on
  // all ranks of the shard group. Starts gathering. REQUIRES: the passes of the
  // previous begin() are done.
  void begin(std::vector<int> blocks);
  void need(int unit);     // UnitHooks::need
  void release(int unit);  // UnitHooks::release
  void join(int unit);     // takes part in gathering, without computing
  // Advances operations in progress.
  void poll();

  uint64_t bytes() const;

 private:
  // Holds a block, or a unit that stays.
  struct Buffer {
    FlatBuffer memory;
    int unit = -1;  // that it holds or is being filled with
    bool loaded = false;
    bool in_use = false;
    comm::RequestPtr request;
  };

  WeightStore(const geometry::ShardTable& shard, const geometry::ZeroPlan& zero,
              kernels::Backend& backend, std::span<const float> master,
              double& waited_s);
  Status allocate();
  bool is_block(int unit) const {
    return shard_.units()[static_cast<size_t>(unit)].kind ==
           geometry::UnitKind::kBlock;
  }
  Buffer& buffer(int unit) {
    return buffers_[buffer_of_[static_cast<size_t>(unit)]];
  }
  std::span<const float> master(size_t unit) const;
  // Starts to gather unit u at `to`, length(u) elements.
  comm::RequestPtr start_gather(size_t unit, float* to);
  void start(int unit);
  void start_ahead();
  void obtain(int unit);  // waits until the unit is gathered
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
  double& waited_s_;
};

}  // namespace remesh::engine
