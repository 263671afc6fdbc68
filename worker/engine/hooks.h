// Engine::Hooks: connects a stage's passes with the weight and gradient stores,
// and reports each unit of a pass as progress, so that limits on a rank without
// progress hold for a layer, however long the pass. Private to this folder.
#pragma once

#include "worker/engine/engine.h"

namespace remesh::engine {

class Engine::Hooks final : public model::UnitHooks {
 public:
  Hooks(WeightStore& weights, GradStore& grads, PipeLinks& links,
        const Progress& progress, const std::function<void()>& more)
      : weights_(weights),
        grads_(grads),
        links_(links),
        progress_(progress),
        more_(more) {}

  // Whether the next passes add a chunk's last gradients.
  void set_last(bool last) { last_ = last; }

  void need(int unit) override {
    poll();
    weights_.need(unit);
  }
  void release(int unit) override { weights_.release(unit); }
  float* grads(int unit) override { return grads_.grads(unit); }
  void ready(int unit) override {
    if (last_) grads_.ready(unit);
    poll();
  }
  // MPI moves data only while it is called (mpi_comm.h).
  void poll() {
    weights_.poll();
    grads_.poll();
    links_.poll();
    progress_.tick();
    if (more_) more_();
  }

 private:
  WeightStore& weights_;
  GradStore& grads_;
  PipeLinks& links_;
  const Progress& progress_;
  const std::function<void()>& more_;  // Engine::set_poll
  bool last_ = false;
};

}  // namespace remesh::engine
