#include "worker/engine/state_store.h"

#include "worker/engine/flat_buffer.h"

namespace remesh::engine {
namespace {

class OwnMemory final : public StateStore {
 public:
  explicit OwnMemory(kernels::Backend& backend) : backend_(backend) {}
  Status reserve(const geometry::Sharding&, int64_t elements) override {
    for (FlatBuffer* b : {&weights_, &exp_avg_, &exp_avg_sq_}) {
      ASSIGN_OR_RETURN(
          *b, FlatBuffer::make(backend_, elements, "the training state"));
    }
    return ok_status();
  }
  ConstStateView current() const override {
    return {weights_.span(), exp_avg_.span(), exp_avg_sq_.span()};
  }
  StateView begin() override {
    return {weights_.span(), exp_avg_.span(), exp_avg_sq_.span()};
  }
  void commit(int64_t) override {}
  int copies() const override { return 1; }

 private:
  kernels::Backend& backend_;
  FlatBuffer weights_, exp_avg_, exp_avg_sq_;
};

}  // namespace

std::unique_ptr<StateStore> own_memory(kernels::Backend& backend) {
  return std::make_unique<OwnMemory>(backend);
}

}  // namespace remesh::engine
