#include "parallel/planner/projection.h"

#include <algorithm>
#include <cmath>

namespace remesh::planner {

double device_power_w(double busy_w, double idle_w, const Terms& t) {
  const double waiting =
      (t.exposed() + t.bubble + t.straggle) / std::max(t.total(), 1e-300);
  return busy_w - (1 - kWaiting) * std::max(busy_w - idle_w, 0.0) * waiting;
}

double young_interval_s(const CheckpointRestart& c) {
  return std::sqrt(2 * c.save_s * c.mtbf_s);
}

double daly_interval_s(const CheckpointRestart& c) {
  if (c.save_s >= 2 * c.mtbf_s) return c.mtbf_s;
  const double x = c.save_s / (2 * c.mtbf_s);
  return young_interval_s(c) * (1 + std::sqrt(x) / 3 + x / 9) - c.save_s;
}

double goodput(const CheckpointRestart& c, double interval_s) {
  if (interval_s <= 0) return 0;
  const double expected = c.mtbf_s * std::exp(c.restart_s / c.mtbf_s) *
                          std::expm1((interval_s + c.save_s) / c.mtbf_s);
  return interval_s / expected;
}

double goodput(const InMemoryRecovery& r) {
  const CheckpointRestart step{.mtbf_s = r.mtbf_s, .restart_s = r.recover_s};
  const double missing = r.lost_share * r.replace_s / r.mtbf_s;
  return goodput(step, r.step_s) / (1 + r.replica_share) / (1 + missing);
}

double lost_share(int node_devices, const geometry::Layout& l) {
  const int replica = l.tp * l.pp * l.cp;
  return std::min(
      1.0, std::max(node_devices, replica) / static_cast<double>(l.world()));
}

}  // namespace remesh::planner
