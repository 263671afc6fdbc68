#include "proto/rundir/events.h"

#include <algorithm>

#include "proto/base/text.h"

namespace remesh::events {
namespace {

constexpr EventKind kKinds[] = {
#define EVENT(constant, ...) constant,
#include "proto/rundir/events.inc"
#undef EVENT
};

}  // namespace

std::span<const EventKind> event_kinds() { return kKinds; }

Tone tone_of(std::string_view name) {
  const auto* kind =
      std::find_if(std::begin(kKinds), std::end(kKinds),
                   [&](const EventKind& k) { return name == k.name; });
  return kind == std::end(kKinds) ? Tone::kNotice : kind->tone;
}

pb::JobStatus::State outcome_of(const std::string& name) {
  if (name == kJobDone) return pb::JobStatus::DONE;
  if (name == kJobStopped) return pb::JobStatus::STOPPED;
  if (name == kJobFailed) return pb::JobStatus::FAILED;
  return pb::JobStatus::UNKNOWN;
}

std::string doing_text(const pb::RankStatus& s) {
  return s.at().has_seconds() ? lasting(s.doing(), s.at().seconds())
                              : s.doing();
}

}  // namespace remesh::events
