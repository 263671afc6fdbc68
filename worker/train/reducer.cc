#include "worker/train/reducer.h"

#include <algorithm>

#include "proto/base/check.h"

namespace remesh::train {

GradReducer::GradReducer(const geometry::ParamTable& table,
                         int64_t bucket_elements, comm::Comm& dp)
    : table_(table), bucket_elements_(bucket_elements), dp_(dp) {
  CHECK(bucket_elements >= 1);
  const int64_t n = table.num_elements();
  parts_.assign(
      static_cast<size_t>((n + bucket_elements - 1) / bucket_elements), 0);
  for (size_t i = 0; i < table.size(); ++i) {
    const int64_t last = (n - 1 - table.offset(i)) / bucket_elements;
    const int64_t first =
        (n - table.offset(i) - table[i].numel()) / bucket_elements;
    for (int64_t k = first; k <= last; ++k) ++parts_[static_cast<size_t>(k)];
  }
  waits_ = parts_;
}

GradReducer::Range GradReducer::bucket(int64_t k) const {
  const int64_t end = table_.num_elements() - k * bucket_elements_;
  return {std::max<int64_t>(0, end - bucket_elements_), end};
}

void GradReducer::begin(std::span<float> grads) {
  CHECK(static_cast<int64_t>(grads.size()) == table_.num_elements());
  CHECK(under_way_.empty());
  grads_ = grads;
  waits_ = parts_;
  is_ready_.assign(table_.size(), false);
  next_ = 0;
}

void GradReducer::ready(size_t param) {
  CHECK(param < is_ready_.size() && !is_ready_[param]);
  is_ready_[param] = true;
  const int64_t n = table_.num_elements();
  const int64_t begin = table_.offset(param);
  const int64_t end = begin + table_[param].numel();
  for (int64_t k = (n - end) / bucket_elements_;
       k <= (n - 1 - begin) / bucket_elements_; ++k)
    --waits_[static_cast<size_t>(k)];
  start_ready();
}

void GradReducer::all_ready() {
  for (size_t i = is_ready_.size(); i-- > 0;)
    if (!is_ready_[i]) ready(i);
}

void GradReducer::start_ready() {
  if (dp_.size() == 1) return;
  for (; next_ < num_buckets() && waits_[static_cast<size_t>(next_)] == 0;
       ++next_) {
    const Range r = bucket(next_);
    under_way_.push_back(dp_.start_all_reduce(
        grads_.subspan(static_cast<size_t>(r.begin),
                       static_cast<size_t>(r.end - r.begin)),
        comm::Op::kSum));
  }
  while (!under_way_.empty() && under_way_.front()->test())
    under_way_.pop_front();
}

void GradReducer::finish(const std::function<void()>& tick) {
  CHECK(std::find(is_ready_.begin(), is_ready_.end(), false) ==
        is_ready_.end());
  while (!under_way_.empty()) {
    under_way_.front()->wait();
    under_way_.pop_front();
    tick();
  }
}

}  // namespace remesh::train
