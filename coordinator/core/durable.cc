#include "coordinator/core/durable.h"

#include <algorithm>

namespace remesh::core {

bool terminal(pb::Durable::Phase phase) {
  return phase == pb::Durable::DONE || phase == pb::Durable::FAILED ||
         phase == pb::Durable::STOPPED;
}

const char* phase_text(pb::Durable::Phase p) {
  switch (p) {
    case pb::Durable::WAITING:
      return "waiting";
    case pb::Durable::PREPARING:
      return "preparing";
    case pb::Durable::RUNNING:
      return "running";
    case pb::Durable::FINISHING:
      return "finishing";
    case pb::Durable::ABORTING:
      return "aborting";
    case pb::Durable::DONE:
      return "done";
    case pb::Durable::FAILED:
      return "failed";
    case pb::Durable::STOPPED:
      return "stopped";
  }
  return "unknown";
}

bool participates(const pb::Durable& durable, const std::string& worker,
                  uint64_t incarnation) {
  for (const pb::Durable::Member& p : durable.participants())
    if (p.name() == worker) return p.incarnation() == incarnation;
  return false;
}

bool has_ranks(const pb::Durable& durable, const std::string& worker) {
  const auto& ranks = durable.assignment().ranks();
  return std::any_of(ranks.begin(), ranks.end(),
                     [&](const auto& p) { return p.worker() == worker; });
}

bool drains(const pb::Durable& durable, const std::string& worker,
            uint64_t incarnation) {
  const auto& all = durable.draining();
  return std::any_of(all.begin(), all.end(), [&](const auto& d) {
    return d.name() == worker && d.incarnation() == incarnation;
  });
}

bool refuses(const pb::Durable& durable, const std::string& checkpoint) {
  const auto& bad = durable.bad_checkpoints();
  return std::find(bad.begin(), bad.end(), checkpoint) != bad.end();
}

}  // namespace remesh::core
