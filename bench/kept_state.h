// A rank's state and replicas in shared memory, set up for benchmarks as a
// worker and a trainer do it. Each rank is a worker of its own; all are on one
// host.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>

#include "bench/cpu_time.h"
#include "parallel/comm/comm.h"
#include "parallel/geometry/param_table.h"
#include "proto/control.pb.h"
#include "worker/engine/engine.h"
#include "worker/train/replication.h"
#include "worker/train/state_home.h"

namespace remesh::bench {

// The spec from which a rank learns where to keep its state.
inline pb::RankSpec spec_of(const geometry::Layout& layout, int rank,
                            const std::string& folder, int64_t global_batch,
                            int64_t seq) {
  pb::RankSpec spec;
  spec.set_rank(rank);
  spec.set_state_folder(folder);
  spec.set_state_job(1);
  pb::Assignment& a = *spec.mutable_assignment();
  a.set_generation(1);
  for (int r = 0; r < layout.world(); ++r) {
    pb::RankPlace& p = *a.add_ranks();
    p.set_rank(r);
    p.set_worker(fmt::format("w{}", r));
    a.add_workers(p.worker());
    a.add_hosts("here");
  }
  pb::Train& t = *a.mutable_job()->mutable_train();
  t.set_global_batch_size(global_batch);
  t.set_seq_len(seq);
  return spec;
}

// A rank's state and replicas in shared memory, in a folder of its own.
class Kept {
 public:
  Kept(const geometry::ParamTable& table, const geometry::Layout& layout,
       int rank, int64_t global_batch, int64_t seq)
      : folder_(fmt::format("/dev/shm/remesh-bench-{}", getpid())),
        table_(table),
        spec_(spec_of(layout, rank, folder_, global_batch, seq)),
        home_(table, spec_, rank) {
    std::filesystem::create_directory(folder_);
  }
  ~Kept() { remove(); }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  train::StateHome& home() { return home_; }
  // Connects the replicas. REQUIRES: home() holds the first state.
  Status replicate(engine::Engine& e, comm::Comm& world) {
    ASSIGN_OR_RETURN(replicas_, train::Replication::prepare(
                                    table_, spec_, world.rank(), home_));
    world.barrier();
    if (replicas_ != nullptr) {
      RETURN_IF_ERROR(replicas_->connect(world));
      e.set_poll([this] {
        const double began = thread_cpu_s();
        (void)replicas_->poll();
        cpu_s_ += thread_cpu_s() - began;
      });
    }
    world.barrier();
    // Mappings stay valid, and a killed benchmark leaves nothing behind.
    remove();
    return ok_status();
  }
  Status before_agreement() {
    if (replicas_ == nullptr) return ok_status();
    const double began = thread_cpu_s();
    Status finished = replicas_->finish([] {});
    cpu_s_ += thread_cpu_s() - began;
    return finished;
  }
  void after_step() {
    if (replicas_ != nullptr) replicas_->start();
  }
  // CPU time spent on replicas so far.
  double replica_cpu_s() const { return cpu_s_; }
  uint64_t replica_bytes() const {
    return replicas_ == nullptr ? 0 : replicas_->bytes();
  }

 private:
  void remove() {
    std::error_code error;
    std::filesystem::remove_all(folder_, error);
  }

  const std::string folder_;
  const geometry::ParamTable& table_;
  const pb::RankSpec spec_;
  train::StateHome home_;
  std::unique_ptr<train::Replication> replicas_;
  double cpu_s_ = 0;
};

}  // namespace remesh::bench
