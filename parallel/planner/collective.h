// Time of a collective operation of a group of ranks. Pure.
//
// Ranks are numbered as in geometry::Layout, and fill nodes in order. A group
// is every stride-th rank, so that of its members
//   local = clamp(node_devices / stride, 1, size)
// share a node; each brings its own link to the network.
//
// Model (Thakur et al. 2005; NCCL's tuning table has the same terms): an
// all-gather or reduce-scatter of S bytes in a ring takes n - 1 steps and moves
// (n - 1) / n S over each link; an all-reduce is both, or a double binary tree
// of 2 log2(nodes) steps between nodes, whichever is faster. The slowest link
// of the ring decides: a link inside the node, or `local` links to the network
// together, which are slower by Machine::oversubscription where the group is
// under more than one switch.
//
// Where the switches of a node add up vectors (NVLink SHARP), an all-reduce is
// also hierarchical, if that is faster: each member sends S to the switch and
// gets the sum of its part, S / local; at the same time the members of
// different nodes reduce these parts in trees, and the sums return the same
// way, so that (1 + 1 / local) S pass a link of the node and 2 (nodes - 1) /
// nodes S / local one of the network. Machine::in_switch of the bandwidth is
// reached: 0.85 with Hopper, 0.74 with Blackwell (nvlsEfficiency in NCCL's
// tuning model, for its algorithms NVLS and NVLSTree). All-gathers and
// reduce-scatters move no less that way.
#pragma once

#include "parallel/planner/description.h"

namespace remesh::planner {

struct Group {
  int size = 1;
  int stride = 1;
};

// Seconds. `bytes` is the whole vector: the input of an all-reduce or
// reduce-scatter, the output of an all-gather.
double all_reduce_s(const Machine& machine, const Group& group, double bytes);
// All-gather or reduce-scatter.
double gather_s(const Machine& machine, const Group& group, double bytes);
// A message between ranks at a distance of `stride`.
double send_s(const Machine& machine, int stride, double bytes);
// The stride of the slowest link between ranks at a distance of `stride` that
// are spread over `span` devices.
int slowest_stride(const Machine& machine, int span, int stride);

}  // namespace remesh::planner
