// GradStore: gradients of a rank's parameters, from the passes that add to them
// to the sum that the update reads.
//
// Each unit's gradient is accumulated in fp32 over the rank's microbatches.
// When it is final on this rank it is summed while backward continues:
//
//   over neighbouring tensor-parallel ranks that hold the same parameters
//   over both ends of the pipeline, for a tied embedding (after all passes: one
//     end finishes it first, the other last)
//   over the data group: all-reduced in buckets when nothing is sharded, else
//     reduce-scattered in the shard group, and the shares all-reduced over its
//     replicas
//
// Sums are in rank order (comm.h), so all ZeRO stages give the same bits, if
// there is one shard group: several are summed each for itself first. The
// ranks of a group must call collectives in the same order, so units start in
// one order on every rank, last unit first, even without a microbatch.
//
// Memory: all gradients of the shard. With one microbatch per step, ZeRO 2 and
// 3 keep less (`streams`): the gradients of two blocks, those of embedding and
// head, and this rank's shares.
//
// Ownership: owns gradients; borrows the rest. Threads: one.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "parallel/comm/comm.h"
#include "parallel/geometry/zero.h"
#include "worker/engine/flat_buffer.h"
#include "worker/engine/units.h"

namespace remesh::engine {

// Null where the group would have one rank. All borrowed.
struct GradGroups {
  std::map<int, comm::Comm*> tp;  // by ShardParam::tp_group
  comm::Comm* ends = nullptr;     // first and last stage, of a tied embedding
  comm::Comm* shard = nullptr;
  comm::Comm* replicas = nullptr;  // the same share in all shard groups
};

class GradStore {
 public:
  // one_microbatch: a step adds to every unit at most once, and a unit is ready
  // before grads() is called for the unit after the next. Adds the seconds it
  // waits for sums to `waited_s`.
  static Result<std::unique_ptr<GradStore>> make(
      const geometry::ShardTable& shard, const geometry::ZeroPlan& zero,
      kernels::Backend& backend, bool one_microbatch, int64_t bucket_elements,
      double& waited_s);
  void connect(const GradGroups& groups) { groups_ = groups; }

  // Starts a step with all gradients zero.
  void begin();
  // The numel() elements to which the gradient of unit u is added.
  float* grads(int unit);
  // The gradient of unit u is final on this rank. REQUIRES: once a step.
  void ready(int unit);
  // Returns when every unit is summed; units that ready() has not named are
  // taken as final. `tick` runs after each.
  void finish(const std::function<void()>& tick);
  // The sum over the unit's update range, valid until the next begin().
  std::span<float> reduced(size_t unit);
  // Advances operations in progress.
  void poll() { move_on(/*wait=*/false); }

  uint64_t bytes() const { return all_.bytes() + shares_.bytes(); }

 private:
  enum class State { kComputing, kReady, kStarted, kSummed };
  struct Sum {  // in progress
    int unit = 0;
    bool scattered = false;  // the first of two sums is done
    size_t begun = 0;        // elements whose second sum has begun
    std::deque<comm::RequestPtr> requests;
  };

  GradStore(const geometry::ShardTable& shard, const geometry::ZeroPlan& zero,
            kernels::Backend& backend, bool one_microbatch,
            int64_t bucket_elements, double& waited_s);
  Status allocate();
  void start_ready(bool tied_too);
  void start(int unit);
  void sum_shared(size_t unit);
  void sum_ends(size_t unit);
  // Both sums of a unit, or what is left of them, are complete.
  bool complete(Sum& sum, bool wait);
  void start_scatters();
  void scatter(bool wait);  // wait: for the oldest
  void start_buckets();
  // wait: until the oldest sum in progress is complete.
  void move_on(bool wait);
  float* memory(size_t unit) { return all_.data() + where_[unit]; }
  bool is_tied(size_t unit) const;

  const geometry::ShardTable& shard_;
  const geometry::ZeroPlan& zero_;
  kernels::Backend& backend_;
  const UnitLayout layout_;
  const bool streams_;
  const int64_t bucket_;
  GradGroups groups_;

  FlatBuffer all_;     // complete units (streams_: a few)
  FlatBuffer shares_;  // streams_: this rank's shares
  std::vector<float> scratch_;
  bool used_ = false;              // all_ may hold nonzero values
  std::vector<int64_t> where_;     // of a unit in all_
  std::vector<int64_t> share_at_;  // in shares_
  std::vector<int> holder_;        // streams_: the unit that has each place
  std::vector<size_t> place_;      // ... by unit
  std::vector<State> state_;
  std::vector<int> order_;  // in which units start
  size_t next_ = 0;         // in order_
  std::deque<Sum> under_way_;
  int buckets_ = 0;  // sums over the replicas that are in progress
  double& waited_s_;
};

}  // namespace remesh::engine
