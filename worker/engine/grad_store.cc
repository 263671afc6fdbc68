#include "worker/engine/grad_store.h"

#include <algorithm>

#include "proto/base/check.h"
#include "worker/engine/timer.h"

namespace remesh::engine {

using geometry::ShardParam;
using geometry::Unit;
using geometry::UnitKind;

// Operations at once of each kind: each has scratch of its own
// (direct_reduce.h).
constexpr int kAtOnce = 8;

GradStore::GradStore(const geometry::ShardTable& shard,
                     const geometry::ZeroPlan& zero, kernels::Backend& backend,
                     bool one_microbatch, int64_t bucket_elements,
                     double& waited_s)
    : shard_(shard),
      zero_(zero),
      backend_(backend),
      layout_(shard, zero.shard_size()),
      streams_(one_microbatch && zero.stage() >= 2 && zero.shard_size() > 1),
      bucket_(bucket_elements),
      waited_s_(waited_s) {
  CHECK(bucket_elements >= 1);
}

Result<std::unique_ptr<GradStore>> GradStore::make(
    const geometry::ShardTable& shard, const geometry::ZeroPlan& zero,
    kernels::Backend& backend, bool one_microbatch, int64_t bucket_elements,
    double& waited_s) {
  auto store = std::unique_ptr<GradStore>(new GradStore(
      shard, zero, backend, one_microbatch, bucket_elements, waited_s));
  RETURN_IF_ERROR(store->allocate());
  return store;
}

Status GradStore::allocate() {
  const size_t n = shard_.units().size();
  int64_t total = layout_.total();
  if (!streams_) {
    for (size_t u = 0; u < n; ++u) where_.push_back(layout_.offset(u));
  } else {
    // Blocks take turns in two places; embedding and head have one each.
    std::vector<int64_t> sizes(2, 0);
    int64_t shares = 0;
    for (size_t u = 0; u < n; ++u) {
      size_t at = sizes.size();
      if (shard_.units()[u].kind == UnitKind::kBlock)
        at = u % 2;
      else
        sizes.push_back(0);
      sizes[at] = std::max(sizes[at], layout_.length(u));
      place_.push_back(at);
      share_at_.push_back(shares);
      shares += layout_.share(u);
    }
    total = 0;
    std::vector<int64_t> begins;
    for (const int64_t s : sizes) {
      begins.push_back(total);
      total += s;
    }
    for (size_t u = 0; u < n; ++u) where_.push_back(begins[place_[u]]);
    holder_.assign(sizes.size(), -1);
    ASSIGN_OR_RETURN(shares_,
                     FlatBuffer::make(backend_, shares, "the gradient shares"));
  }
  ASSIGN_OR_RETURN(all_, FlatBuffer::make(backend_, total, "the gradients"));
  for (size_t u = n; u-- > 0;)
    if (!is_tied(u)) order_.push_back(static_cast<int>(u));
  for (size_t u = n; u-- > 0;)
    if (is_tied(u)) order_.push_back(static_cast<int>(u));
  return ok_status();
}

bool GradStore::is_tied(size_t unit) const {
  const Unit& u = shard_.units()[unit];
  for (size_t i = u.first; i < u.last; ++i)
    if (shard_[i].tied_copy) return true;
  return false;
}

void GradStore::begin() {
  CHECK(under_way_.empty());
  // New memory is zero, so the first step need not clear it.
  if (used_ && !streams_) backend_.zero(all_.data(), all_.bytes());
  used_ = true;
  std::fill(holder_.begin(), holder_.end(), -1);
  state_.assign(shard_.units().size(), State::kComputing);
  next_ = 0;
}

float* GradStore::grads(int unit) {
  const auto u = static_cast<size_t>(unit);
  CHECK(u < state_.size() && state_[u] == State::kComputing);
  if (streams_ && holder_[place_[u]] != unit) {
    const int before = holder_[place_[u]];
    if (before >= 0) {
      const auto b = static_cast<size_t>(before);
      CHECK_MSG(state_[b] != State::kComputing,
                "more gradients at once than there are places");
      const Timer timer(waited_s_);
      while (state_[b] != State::kSummed) {
        CHECK(!under_way_.empty());
        move_on(/*wait=*/true);
      }
    }
    holder_[place_[u]] = unit;
    backend_.zero(memory(u), static_cast<size_t>(layout_.length(u)) * 4);
  }
  return memory(u);
}

void GradStore::ready(int unit) {
  const auto u = static_cast<size_t>(unit);
  CHECK(u < state_.size() && state_[u] == State::kComputing);
  grads(unit);  // takes a place, even when nothing was added
  state_[u] = State::kReady;
  start_ready(/*tied_too=*/false);
  poll();
}

void GradStore::start_ready(bool tied_too) {
  for (; next_ < order_.size(); ++next_) {
    const auto u = static_cast<size_t>(order_[next_]);
    if (state_[u] != State::kReady || (is_tied(u) && !tied_too)) return;
    start(order_[next_]);
  }
}

// Packs the gradients that a group of tensor-parallel ranks shares into one
// message.
void GradStore::sum_shared(size_t unit) {
  const Unit& u = shard_.units()[unit];
  for (const auto& [group_degree, group] : groups_.tp) {
    const int degree = group_degree;
    scratch_.clear();
    const auto each = [&](const auto& f) {
      for (size_t i = u.first; i < u.last; ++i) {
        const ShardParam& p = shard_[i];
        if (p.tp_group == degree)
          f(memory(unit) + (p.offset - u.begin), p.numel());
      }
    };
    each([&](const float* g, int64_t n) {
      scratch_.insert(scratch_.end(), g, g + n);
    });
    if (scratch_.empty()) continue;
    group->all_reduce(std::span(scratch_), comm::Op::kSum);
    const float* from = scratch_.data();
    each([&](float* g, int64_t n) {
      std::copy_n(from, n, g);
      from += n;
    });
  }
}

void GradStore::sum_ends(size_t unit) {
  const Unit& u = shard_.units()[unit];
  for (size_t i = u.first; i < u.last; ++i) {
    const ShardParam& p = shard_[i];
    if (!p.tied_copy) continue;
    CHECK(groups_.ends != nullptr);
    const Timer timer(waited_s_);
    groups_.ends->all_reduce(std::span(memory(unit) + (p.offset - u.begin),
                                       static_cast<size_t>(p.numel())),
                             comm::Op::kSum);
  }
}

void GradStore::start(int unit) {
  const auto u = static_cast<size_t>(unit);
  {
    const Timer timer(waited_s_);
    sum_shared(u);
  }
  if (is_tied(u)) sum_ends(u);
  state_[u] = State::kStarted;
  under_way_.push_back({.unit = unit, .scattered = groups_.shard == nullptr});
  start_buckets();
}

// A few at a time, in the order of the units, which is the same on every rank.
void GradStore::start_scatters() {
  int open = 0;
  for (Sum& sum : under_way_) {
    if (sum.scattered) continue;
    if (++open > kAtOnce) return;
    if (!sum.requests.empty()) continue;
    const auto u = static_cast<size_t>(sum.unit);
    const auto length = static_cast<size_t>(layout_.length(u));
    const auto share = static_cast<size_t>(layout_.share(u));
    sum.requests.push_back(groups_.shard->start_reduce_scatter(
        {memory(u), length}, {reduced(u).data(), share}));
  }
}

// Likewise, and in buckets, so that finished parts of a large unit are not
// polled again.
void GradStore::start_buckets() {
  const auto bucket = static_cast<size_t>(bucket_);
  for (Sum& sum : under_way_) {
    if (!sum.scattered) return;
    if (groups_.replicas == nullptr) continue;
    const std::span<float> data = reduced(static_cast<size_t>(sum.unit));
    while (sum.begun < data.size()) {
      if (buckets_ == kAtOnce) return;
      const size_t n = std::min(bucket, data.size() - sum.begun);
      sum.requests.push_back(groups_.replicas->start_all_reduce(
          data.subspan(sum.begun, n), comm::Op::kSum));
      sum.begun += n;
      ++buckets_;
    }
  }
}

bool GradStore::complete(Sum& sum, bool wait) {
  while (!sum.requests.empty()) {
    if (wait)
      sum.requests.front()->wait();
    else if (!sum.requests.front()->test())
      return false;
    sum.requests.pop_front();
    if (!sum.scattered) continue;
    --buckets_;
    start_buckets();
  }
  return true;
}

void GradStore::scatter(bool wait) {
  start_scatters();
  for (Sum& sum : under_way_) {
    if (sum.scattered) continue;
    if (!complete(sum, wait && &sum == &under_way_.front())) return;
    sum.scattered = true;
    start_scatters();
    start_buckets();
  }
}

void GradStore::move_on(bool wait) {
  scatter(wait);
  while (!under_way_.empty() && under_way_.front().scattered &&
         complete(under_way_.front(), wait)) {
    state_[static_cast<size_t>(under_way_.front().unit)] = State::kSummed;
    under_way_.pop_front();
    if (wait) return;
  }
}

void GradStore::finish(const std::function<void()>& tick) {
  for (const int unit : order_)
    if (state_[static_cast<size_t>(unit)] == State::kComputing) ready(unit);
  start_ready(/*tied_too=*/true);
  CHECK(next_ == order_.size());
  while (!under_way_.empty()) {
    const Timer timer(waited_s_);
    move_on(/*wait=*/true);
    tick();
  }
}

std::span<float> GradStore::reduced(size_t unit) {
  const auto n = static_cast<size_t>(zero_.update_range(unit).size());
  if (streams_) return {shares_.data() + share_at_[unit], n};
  return {memory(unit) + layout_.share(unit) * zero_.shard_index(), n};
}

}  // namespace remesh::engine
