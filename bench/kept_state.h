// A rank's state and replicas in shared memory, set up for benchmarks as a
// worker and a trainer do it. Each rank is a worker of its own; all are on one
// host.
#pragma once

#include <fmt/format.h>

#include <memory>
#include <string>

#include "bench/process_use.h"
#include "parallel/comm/comm.h"
#include "parallel/geometry/param_table.h"
#include "proto/control.pb.h"
#include "tests/testing/engine.h"
#include "tests/testing/temp_dir.h"
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
      : table_(table),
        spec_(spec_of(layout, rank, folder_->path(), global_batch, seq)),
        home_(table, spec_, rank) {}
  train::StateHome& home() { return home_; }
  // An engine with initial weights and, if the mesh has them, replicas.
  // `store`: puts states into home(); null: home() itself. Collective.
  Result<std::unique_ptr<engine::Engine>> make_engine(
      comm::Mesh& mesh, const engine::EngineOptions& options,
      kernels::Backend& backend, uint64_t seed,
      engine::StateStore* store = nullptr) {
    ASSIGN_OR_RETURN(auto engine, engine::make_ready_engine(
                                      table_, mesh, options, backend, seed,
                                      store != nullptr ? store : &home_));
    comm::Comm& world = mesh.world();
    ASSIGN_OR_RETURN(replicas_, train::Replication::prepare(
                                    table_, spec_, world.rank(), home_));
    world.barrier();
    if (replicas_ != nullptr) {
      RETURN_IF_ERROR(replicas_->connect(world));
      engine->set_poll([this] {
        const double began = thread_cpu_s();
        (void)replicas_->poll();
        cpu_s_ += thread_cpu_s() - began;
      });
    }
    world.barrier();
    // Mappings stay valid, and a killed benchmark leaves nothing behind.
    folder_.reset();
    return engine;
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
  std::unique_ptr<ShmDir> folder_ = std::make_unique<ShmDir>();
  const geometry::ParamTable& table_;
  const pb::RankSpec spec_;
  train::StateHome home_;
  std::unique_ptr<train::Replication> replicas_;
  double cpu_s_ = 0;
};

}  // namespace remesh::bench
