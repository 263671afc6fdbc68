#include "parallel/planner/collective.h"

#include <algorithm>
#include <cmath>

namespace remesh::planner {
namespace {

struct Path {
  int local = 1, nodes = 1;
  double step_s = 0;  // latencies of all n - 1 steps of a ring
  double bytes_per_s = 1;
};

// Between devices of a group that extends over so many.
double network_bytes_per_s(const Machine& m, int64_t span) {
  return span > m.switch_devices ? m.network_bytes_per_s / m.oversubscription
                                 : m.network_bytes_per_s;
}

Path path_of(const Machine& m, const Group& g) {
  Path p;
  const int local = p.local = std::clamp(m.node_devices / g.stride, 1, g.size);
  p.nodes = (g.size + local - 1) / local;
  p.step_s =
      (p.nodes - 1) * m.network_hop_s + (g.size - p.nodes) * m.node_hop_s;
  p.bytes_per_s = m.node_bytes_per_s;
  if (p.nodes == 1) return p;
  p.bytes_per_s = local * network_bytes_per_s(m, int64_t{g.size} * g.stride);
  if (local > 1) p.bytes_per_s = std::min(p.bytes_per_s, m.node_bytes_per_s);
  return p;
}

double tree_step_s(const Machine& m, const Path& p) {
  return std::ceil(std::log2(p.nodes)) * m.network_hop_s;
}

// The switches of the nodes add up the vectors, trees the sums of nodes. Their
// steps take 20.9 us in NCCL's table instead of 14.
double in_switch_s(const Machine& m, const Group& g, const Path& p,
                   double bytes) {
  const double nodes = p.nodes, local = p.local;
  const double network = network_bytes_per_s(m, int64_t{g.size} * g.stride);
  const double moving = std::max((1 + 1 / local) / m.node_bytes_per_s,
                                 2 * (nodes - 1) / nodes / local / network);
  constexpr double kStep = 1.5;
  return m.collective_base_s + 2 * (kStep * tree_step_s(m, p) + m.node_hop_s) +
         bytes * moving / m.in_switch;
}

}  // namespace

double gather_s(const Machine& m, const Group& g, double bytes) {
  if (g.size <= 1) return 0;
  const Path p = path_of(m, g);
  return m.collective_base_s + p.step_s +
         bytes * (g.size - 1) / g.size / p.bytes_per_s;
}

double all_reduce_s(const Machine& m, const Group& g, double bytes) {
  if (g.size <= 1) return 0;
  const Path p = path_of(m, g);
  const int local = (g.size + p.nodes - 1) / p.nodes;
  const double tree_steps =
      2 * (tree_step_s(m, p) + (local - 1) * m.node_hop_s);
  const double seconds = m.collective_base_s +
                         std::min(2 * p.step_s, tree_steps) +
                         2 * bytes * (g.size - 1) / g.size / p.bytes_per_s;
  if (m.in_switch == 0 || p.local == 1) return seconds;
  return std::min(seconds, in_switch_s(m, g, p, bytes));
}

double send_s(const Machine& m, int stride, double bytes) {
  const bool inside = stride < m.node_devices;
  return m.collective_base_s +
         (inside ? m.node_hop_s + bytes / m.node_bytes_per_s
                 : m.network_hop_s +
                       bytes / network_bytes_per_s(m, int64_t{stride} + 1));
}

int slowest_stride(const Machine& m, int span, int stride) {
  if (span > m.switch_devices)
    return std::max(stride, static_cast<int>(m.switch_devices));
  return span > m.node_devices ? std::max(stride, m.node_devices) : stride;
}

}  // namespace remesh::planner
