#include "checkpoint/exchange/mapped.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "checkpoint/memory/stream_copy.h"
#include "proto/base/check.h"

namespace remesh::exchange {

using geometry::kNumStateVectors;
using memory::StateSegment;

namespace {

constexpr int64_t kCached = int64_t{1} << 13;  // elements: 32 KiB

}  // namespace

MappedReplica::MappedReplica(int rank, std::unique_ptr<StateSegment> owner,
                             StateSegment& copy, int64_t elements,
                             int64_t piece_bytes)
    : rank_(rank),
      owner_(std::move(owner)),
      copy_(copy),
      elements_(elements),
      piece_(std::max<int64_t>(1, piece_bytes / 4)) {
  CHECK(elements <= copy.capacity());
}

void MappedReplica::start(int64_t step, int64_t generation) {
  CHECK(done());
  step_ = step;
  generation_ = generation;
  in_progress_ = true;
  found_ = false;
  status_ = ok_status();
}

bool MappedReplica::find() {
  for (const auto& c : owner_->contents().states)
    if (c.info.step == step_ && c.info.generation == generation_ &&
        c.info.rank == rank_ && !c.info.replica &&
        c.info.elements == elements_) {
      from_ = c;
      const auto held = copy_.contents().states;
      buffer_ = held.empty() ? 0 : 1 - held.front().buffer;
      copy_.begin(buffer_);
      at_ = 0;
      stream_.reset();
      return true;
    }
  return false;
}

bool MappedReplica::poll() {
  if (!in_progress_) return true;
  if (!found_ && !(found_ = find())) return false;
  const int64_t end = static_cast<int64_t>(kNumStateVectors) * elements_;
  if (at_ < end) {
    const auto v = static_cast<size_t>(at_ / elements_);
    const int64_t begin = at_ % elements_;
    const int64_t size = std::min(piece_, elements_ - begin);
    const float* const from =
        owner_->read(from_.buffer, elements_)[v].data() + begin;
    float* const to = copy_.write(buffer_, elements_)[v].data() + begin;
    // Hashed and copied in parts that fit into the L1 cache.
    for (int64_t i = 0; i < size; i += kCached) {
      const auto bytes =
          static_cast<size_t>(std::min(kCached, size - i)) * sizeof(float);
      stream_.add(from + i, bytes);
      memory::stream_copy(to + i, from + i, bytes);
    }
    at_ += size;
    ++pieces_;
    if (at_ % elements_ == 0) {
      hash_[v] = stream_.digest();
      stream_.reset();
    }
  }
  if (at_ < end) return false;
  finish();
  return true;
}

void MappedReplica::finish() {
  in_progress_ = false;
  if (elements_ == 0) hash_.fill(stream_.digest());
  if (!owner_->is_valid(from_)) {
    status_ =
        corrupt(fmt::format("replica of rank {}: its state of step {} was "
                            "overwritten during the copy",
                            rank_, step_));
    return;
  }
  memory::StateInfo info = from_.info;
  info.replica = true;
  info.content = hash_;
  (void)copy_.commit(info);
}

}  // namespace remesh::exchange
