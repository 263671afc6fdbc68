#include "coordinator/core/fence_relay.h"

#include <algorithm>

#include "coordinator/core/durable.h"

namespace remesh::core {

FenceRelay::Delivery FenceRelay::add(const pb::FenceIn& f,
                                     const pb::Durable& durable) {
  auto& in = fences_[f.index()];
  const bool again = in.contains(f.worker());
  in[f.worker()] = f.blob();
  Delivery out;
  out.result.set_epoch(durable.epoch());
  out.result.set_generation(f.generation());
  out.result.set_index(f.index());
  for (const std::string& w : durable.assignment().workers()) {
    if (!has_ranks(durable, w)) continue;
    if (!in.contains(w)) return {};
    out.result.mutable_blob()->append(in[w]);
  }
  for (const auto& [worker, blob] : in)
    if (!again || worker == f.worker()) out.workers.push_back(worker);
  return out;
}

bool FenceRelay::misses(const std::string& worker) const {
  return std::ranges::any_of(fences_, [&](const auto& fence) {
    return !fence.second.contains(worker);
  });
}

}  // namespace remesh::core
