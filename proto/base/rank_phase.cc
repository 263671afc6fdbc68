#include "proto/base/rank_phase.h"

#include <array>
#include <cstddef>

namespace remesh {

const char* rank_phase_name(RankPhase phase) {
  static constexpr std::array kNames = {
      "starting", "connecting", "restoring",  "compute",  "reduce",
      "update",   "validate",   "checkpoint", "stopping", "ended"};
  const auto i = static_cast<size_t>(phase);
  return i < kNames.size() ? kNames[i] : "unknown";
}

}  // namespace remesh
