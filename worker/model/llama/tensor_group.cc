#include "worker/model/llama/tensor_group.h"

namespace remesh::model {
namespace {

size_t count(int64_t n) { return static_cast<size_t>(n); }

}  // namespace

comm::RequestPtr TensorGroup::start_gather(const Rows& rows, kernels::Dtype d,
                                           void* all) const {
  if (comm_ == nullptr || all == nullptr) return nullptr;
  backend_.synchronize();
  const size_t bytes = count(rows.n * sizes_.dim) * kernels::dtype_size(d);
  return comm_->start_all_gather(
      {static_cast<const std::byte*>(own(rows, d, all)), bytes},
      {static_cast<std::byte*>(all), bytes * count(sizes_.tp)});
}

TensorGroup::Sum TensorGroup::start_sum(const Rows& rows, float* partial,
                                        float* mine) const {
  if (comm_ == nullptr) return {partial, nullptr};
  backend_.zero(partial + rows.N * sizes_.dim,
                count((rows.P - rows.N) * sizes_.dim) * sizeof(float));
  backend_.synchronize();
  return {mine,
          comm_->start_reduce_scatter({partial, count(rows.P * sizes_.dim)},
                                      {mine, count(rows.n * sizes_.dim)})};
}

void TensorGroup::all_reduce(int64_t n, float* x, comm::Op op) const {
  if (comm_ == nullptr) return;
  backend_.synchronize();
  comm_->all_reduce(std::span<float>(x, count(n)), op);
}

}  // namespace remesh::model
