// Recovery, continued: when an older state is used although a newer one exists.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <utility>

#include "coordinator/core/cordons.h"
#include "coordinator/core/recovery.h"
#include "proto/base/text.h"

namespace remesh::core {

bool Recovery::await_newer(Inventory& candidates, const Inputs& in,
                           const StateChoice& best, Decision* out) {
  return await_holders(in, best, out) ||
         await_rescue(candidates, in, best, out);
}

// Whether the newest state is on hosts where ranks failed, which may be tried
// again later, alone.
bool Recovery::await_rescue(Inventory& candidates, const Inputs& in,
                            const StateChoice& best, Decision* out) {
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  constexpr int64_t kLookMs = 1000;  // a cordon may be lifted meanwhile
  std::set<std::string> hosts;
  int64_t left_ms = kNever;
  for (const auto& [name, m] : in.view.roster.members()) {
    if (!m.alive || m.sent_away) continue;
    const auto in_ms = in.policy.rescue_in_ms(in.view, m.report.host(), name);
    if (!in_ms) continue;
    hosts.insert(m.report.host());
    if (*in_ms > 0) left_ms = std::min(left_ms, *in_ms);
  }
  const int64_t newest =
      left_ms == kNever ? best.step : choose(candidates, in, hosts).step;
  const bool waits = newest > best.step;
  const bool announced = std::exchange(awaits_rescue_, waits);
  if (!waits) return false;
  out->kind = Decision::Kind::kWait;
  out->rescan_ms = std::min(left_ms, kLookMs);
  if (!announced)
    out->why = fmt::format(
        "step {} is only in the memory of hosts where ranks fail; trying again "
        "in {} before going back to step {}; {}",
        newest, format_duration(static_cast<double>(left_ms) / 1000), best.step,
        cordons_text(in.view.durable.host_faults()));
  return true;
}

// Whether to scan again because a newer checkpoint of this branch cannot be
// read, which is no damage and may pass.
bool Recovery::await_readable(const Inputs& in, const StateChoice& chosen,
                              Decision* out) {
  constexpr int64_t kRescanMs = 1000;
  constexpr int64_t kUnreadableMs = 600'000;
  const bool none = chosen.kind == pb::Source::INIT;
  const int64_t newest =
      std::max(in.view.durable.saved_step(), in.ledger.last_finished());
  const InvalidCheckpoint* newer = nullptr;
  for (const InvalidCheckpoint& c : in.scan.invalid)
    if (c.is_unreadable() && c.step > chosen.step &&
        (none || c.step <= newest) &&
        (newer == nullptr || c.step > newer->step))
      newer = &c;
  const bool first_time = unreadable_since_ms_ < 0;
  if (newer == nullptr || first_time)
    unreadable_since_ms_ = newer == nullptr ? -1 : in.view.now_ms;
  if (newer == nullptr ||
      (!none && in.view.now_ms - unreadable_since_ms_ >= kUnreadableMs))
    return false;
  out->kind = Decision::Kind::kWait;
  out->rescan_ms = kRescanMs;
  if (first_time)
    out->why =
        newer->why + (none ? "; looking again until it can be read"
                           : fmt::format("; looking again for up to {} minutes "
                                         "before going back to step {}",
                                         kUnreadableMs / 60'000, chosen.step));
  return true;
}

}  // namespace remesh::core
