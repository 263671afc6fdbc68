// What the cost model computes with, from the descriptions of clusters and
// models (proto/cluster.proto; deploy/clusters, deploy/models). Plain values in
// SI units. Pure.
#pragma once

#include <cstdint>
#include <limits>

#include "parallel/geometry/model_config.h"
#include "proto/cluster.pb.h"

namespace remesh::planner {

// A cluster by the rates that programs reach: peaks times [efficiency].
struct Machine {
  // Rates and sizes of a device.
  double flops = 1;                  // large GEMMs, 16-bit, FLOP/s
  double fp32_flops = 0.5;           // likewise in fp32
  double fp8_flops = 0;              // likewise in fp8; 0: none
  double attention_flops = 1;        // fused attention of general programs
  double fp32_attention_flops = 1;   // the same in fp32
  double tuned_attention_flops = 1;  // of the vendor's library
  double memory_bytes_per_s = 1;
  double memory_bytes = 0;
  double peak_flops = 1;      // in 16 bits
  double peak_fp8_flops = 0;  // 0: none
  int64_t cores = 1;
  double launch_s = 0;     // of the host, for each operation
  double gemm_gap_s = 0;   // between two GEMMs
  double gemm_ramp = 256;  // steps of the inner dimension: layer_cost.cc
  // Hidden communication takes cores and memory bandwidth from compute: so much
  // of its time.
  double contention = 0.3;
  double straggle = 0;  // relative standard deviation
  // Links: one way, of a device. Latencies are those of one step.
  int node_devices = 1;
  double node_bytes_per_s = 1;
  double network_bytes_per_s = 1;
  // Beyond so many devices, those under a switch, the network is slower.
  int64_t switch_devices = std::numeric_limits<int64_t>::max();
  double oversubscription = 1;
  // All-reduces in the switches of a node reach this share of both bandwidths;
  // 0: its switches add up nothing.
  double in_switch = 0;
  double collective_base_s = 0;
  double node_hop_s = 0;
  double network_hop_s = 0;
  friend bool operator==(const Machine&, const Machine&) = default;
};

// REQUIRES: the description was read by jobfile::parse_description().
Machine machine_of(const pb::Cluster& cluster);

// The planner also knows the architecture "gpt", whose feed-forward has two
// matrices instead of three; the engine runs none. Fails like
// ModelConfig::validate().
Result<geometry::ModelConfig> model_of(const pb::ModelFile& file);

// The model as one of the engine's, which have a parameter table: a "gpt" as a
// "llama", with the same attention, embedding and head.
geometry::ModelConfig model_of_engine(geometry::ModelConfig model);

}  // namespace remesh::planner
