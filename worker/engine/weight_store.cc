#include "worker/engine/weight_store.h"

#include <algorithm>

#include "proto/base/check.h"
#include "worker/engine/timer.h"

namespace remesh::engine {

using geometry::FlatRange;
using geometry::UnitKind;

WeightStore::WeightStore(const geometry::ShardTable& shard,
                         const geometry::ZeroPlan& zero,
                         kernels::Backend& backend,
                         std::span<const float> master, double& waited_s)
    : shard_(shard),
      zero_(zero),
      backend_(backend),
      master_(master),
      layout_(shard, zero.shard_size()),
      sharded_(zero.shard_size() > 1),
      streams_(sharded_ && zero.stage() == 3),
      waited_s_(waited_s) {}

Result<std::unique_ptr<WeightStore>> WeightStore::make(
    const geometry::ShardTable& shard, const geometry::ZeroPlan& zero,
    kernels::Backend& backend, std::span<const float> master,
    double& waited_s) {
  CHECK(static_cast<int64_t>(master.size()) == zero.state_elements());
  auto store = std::unique_ptr<WeightStore>(
      new WeightStore(shard, zero, backend, master, waited_s));
  RETURN_IF_ERROR(store->allocate());
  return store;
}

Status WeightStore::allocate() {
  if (!sharded_) return ok_status();
  if (!streams_) {
    gathers_.resize(shard_.units().size());
    ASSIGN_OR_RETURN(full_, FlatBuffer::make(backend_, layout_.total(),
                                             "the gathered weights"));
    return ok_status();
  }
  // Elements of every buffer: kBlockBuffers per chunk, then one per unit that
  // stays.
  std::vector<int64_t> sizes(
      static_cast<size_t>(shard_.chunks()) * kBlockBuffers, 0);
  for (size_t u = 0; u < shard_.units().size(); ++u) {
    const geometry::Unit& unit = shard_.units()[u];
    size_t at = sizes.size();
    if (unit.kind == UnitKind::kBlock)
      at = static_cast<size_t>(unit.chunk * kBlockBuffers +
                               (unit.layer - shard_.first_layer(unit.chunk)) %
                                   kBlockBuffers);
    else
      sizes.push_back(0);
    sizes[at] = std::max(sizes[at], layout_.length(u));
    buffer_of_.push_back(at);
  }
  buffers_.resize(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    ASSIGN_OR_RETURN(buffers_[i].memory,
                     FlatBuffer::make(backend_, sizes[i], "gathered weights"));
  }
  return ok_status();
}

void WeightStore::connect(comm::Comm* gather,
                          std::vector<model::Stage*> stages) {
  CHECK((gather != nullptr) == sharded_);
  CHECK(gather == nullptr || gather->size() == zero_.shard_size());
  CHECK(static_cast<int>(stages.size()) == shard_.chunks());
  gather_ = gather;
  stages_ = std::move(stages);
}

void WeightStore::set_master(std::span<const float> master) {
  CHECK(static_cast<int64_t>(master.size()) == zero_.state_elements());
  master_ = master;
}

std::span<const float> WeightStore::master(size_t unit) const {
  return master_.subspan(static_cast<size_t>(zero_.state_offset(unit)),
                         static_cast<size_t>(zero_.update_range(unit).size()));
}

void WeightStore::load(size_t unit, const float* weights) {
  const geometry::Unit& u = shard_.units()[unit];
  stages_[static_cast<size_t>(u.chunk)]->load_unit(
      static_cast<int>(unit), {weights, static_cast<size_t>(u.numel())});
}

comm::RequestPtr WeightStore::start_gather(size_t unit, float* to) {
  const auto each = static_cast<size_t>(layout_.share(unit));
  const auto mine =
      std::span(to, each * static_cast<size_t>(gather_->size()))
          .subspan(each * static_cast<size_t>(gather_->rank()), each);
  const std::span<const float> from = master(unit);
  backend_.copy(mine.data(), from.data(), from.size_bytes());
  return gather_->start_all_gather(
      std::as_bytes(mine), std::as_writable_bytes(std::span(
                               to, static_cast<size_t>(layout_.length(unit)))));
}

void WeightStore::updated(size_t unit) {
  if (streams_) return;
  if (!sharded_) return load(unit, master(unit).data());
  gathers_[unit] = start_gather(unit, full_.data() + layout_.offset(unit));
  poll();
}

void WeightStore::update_done(const std::function<void()>& tick) {
  // Anything gathered so far belongs to the previous state.
  for (Buffer& b : buffers_) {
    CHECK(b.request == nullptr && !b.in_use);
    b.unit = -1;
  }
  for (size_t u = 0; u < gathers_.size(); ++u) {
    CHECK_MSG(gathers_[u] != nullptr, "a unit was not updated()");
    {
      const Timer timer(waited_s_);
      gathers_[u]->wait();
    }
    gathers_[u].reset();
    load(u, full_.data() + layout_.offset(u));
    tick();
  }
}

void WeightStore::begin(std::vector<int> blocks) {
  if (!streams_) return;
  CHECK_MSG(next_ == plan_.size(), "planned passes did not run");
  plan_ = std::move(blocks);
  next_ = 0;
  // Units that stay: the embedding is needed first, the head last.
  for (size_t u = 0; u < shard_.units().size(); ++u)
    if (shard_.units()[u].kind == UnitKind::kEmbedding)
      start(static_cast<int>(u));
  start_ahead();
  for (size_t u = 0; u < shard_.units().size(); ++u)
    if (shard_.units()[u].kind == UnitKind::kHead) start(static_cast<int>(u));
}

void WeightStore::start(int unit) {
  Buffer& b = buffer(unit);
  if (b.unit == unit) return;
  CHECK(!b.in_use && b.request == nullptr);
  b.unit = unit;
  b.loaded = false;
  b.request = start_gather(static_cast<size_t>(unit), b.memory.data());
}

// Starts to gather what the passes need next, into buffers that are neither in
// use nor hold something needed earlier.
void WeightStore::start_ahead() {
  std::vector<size_t> taken;
  for (size_t i = next_; i < plan_.size(); ++i) {
    const size_t at = buffer_of_[static_cast<size_t>(plan_[i])];
    if (std::find(taken.begin(), taken.end(), at) != taken.end()) return;
    Buffer& b = buffers_[at];
    if (b.unit != plan_[i]) {
      if (b.in_use) return;
      start(plan_[i]);
    }
    taken.push_back(at);
    if (taken.size() >= kBlockBuffers) return;
  }
}

void WeightStore::obtain(int unit) {
  Buffer& b = buffer(unit);
  if (is_block(unit)) {
    CHECK_MSG(next_ < plan_.size() && plan_[next_] == unit,
              "a block is needed out of order");
    ++next_;
    start(unit);
  }
  CHECK_MSG(b.unit == unit, "begin() comes first");
  if (b.request == nullptr) return;
  const Timer timer(waited_s_);
  b.request->wait();
  b.request.reset();
}

void WeightStore::need(int unit) {
  if (!streams_) return;
  Buffer& b = buffer(unit);
  if (b.in_use) {
    CHECK(b.unit == unit && b.loaded);
    return;
  }
  obtain(unit);
  if (!b.loaded) load(static_cast<size_t>(unit), b.memory.data());
  b.loaded = true;
  b.in_use = true;
  start_ahead();
}

void WeightStore::release(int unit) {
  if (!streams_) return;
  buffer(unit).in_use = false;
  start_ahead();
}

void WeightStore::join(int unit) {
  if (!streams_) return;
  obtain(unit);
  start_ahead();
}

void WeightStore::poll() {
  for (Buffer& b : buffers_)
    if (b.request != nullptr) b.request->test();
  for (const comm::RequestPtr& r : gathers_)
    if (r != nullptr) {
      r->test();
      return;
    }
}

uint64_t WeightStore::bytes() const {
  uint64_t bytes = full_.bytes();
  for (const Buffer& b : buffers_) bytes += b.memory.bytes();
  return bytes;
}

}  // namespace remesh::engine
