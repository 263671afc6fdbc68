// TensorGroup: how the rows of a microbatch move between the ranks that split
// its layers (sequence parallelism, Korthikanti et al. 2022). Private to this
// folder.
//
// Row matrices that all ranks need have P = n * tp rows. Rank i computes its
// own part, rows [i * n, (i + 1) * n), in place, and gather() fills in the
// rest. Without tensor parallelism n = N = P and nothing is sent.
#pragma once

#include "parallel/comm/comm.h"
#include "worker/kernels/backend.h"
#include "worker/model/llama/sizes.h"

namespace remesh::model {

class TensorGroup {
 public:
  // comm: nullptr without tensor parallelism.
  TensorGroup(const Sizes& sizes, kernels::Backend& backend, comm::Comm* comm)
      : sizes_(sizes), backend_(backend), comm_(comm) {}

  // The own part of a matrix of P rows of `dim`.
  void* own(const Rows& rows, kernels::Dtype d, void* all) const {
    return kernels::element(all, d, sizes_.tp_index * rows.n * sizes_.dim);
  }
  // Starts to complete a matrix whose own part is ready. It must stay until the
  // request is done; nullptr when nothing is to be done or `all` is nullptr.
  comm::RequestPtr start_gather(const Rows& rows, kernels::Dtype d,
                                void* all) const;
  void gather(const Rows& rows, kernels::Dtype d, void* all) const {
    const comm::RequestPtr request = start_gather(rows, d, all);
    if (request != nullptr) request->wait();
  }

  // A sum over ranks in progress.
  class Sum {
   public:
    Sum(float* result, comm::RequestPtr request)
        : result_(result), request_(std::move(request)) {}
    // The n own rows of the sum.
    float* wait() {
      if (request_ != nullptr) request_->wait();
      request_.reset();
      return result_;
    }

   private:
    float* result_;
    comm::RequestPtr request_;
  };
  // Sums the ranks' `partial` (N rows written, room for P). Each rank gets its
  // own n rows in `mine`, or in `partial` itself without tensor parallelism.
  // Both must stay until wait().
  Sum start_sum(const Rows& rows, float* partial, float* mine) const;
  float* sum(const Rows& rows, float* partial, float* mine) const {
    return start_sum(rows, partial, mine).wait();
  }

  // In place over the ranks, n values.
  void all_reduce(int64_t n, float* x, comm::Op op) const;
  bool split() const { return comm_ != nullptr; }

 private:
  const Sizes& sizes_;
  kernels::Backend& backend_;
  comm::Comm* comm_;
};

}  // namespace remesh::model
