// What a training run takes beyond its steps: power, failures, checkpoints.
// Pure.
#pragma once

#include "parallel/planner/step_cost.h"

namespace remesh::planner {

// Mean power of a device in a step, W. A device that waits for messages or for
// other stages takes its idle power and kWaiting of what load adds to that: its
// communication kernels spin. Chosen by arXiv 2411.13055, where 37 % less
// throughput came with 6 % less power. 0 if the power under load is unknown.
inline constexpr double kWaiting = 0.82;
double device_power_w(double busy_w, double idle_w, const Terms& step);

// Failures arrive independently, at a constant rate. Times in seconds.
//
// Restart from checkpoints every `interval_s`, each of which stops training for
// save_s; a failure costs restart_s and the work since the last checkpoint, and
// the restart itself may fail. Daly 2006, "A higher order estimate of the
// optimum checkpoint interval for restart dumps", equations 13 (the expected
// time) and 37 (the interval, a refinement of Young's 1974 sqrt(2 save mtbf)).
struct CheckpointRestart {
  double mtbf_s = 0;  // of the run: any of its devices
  double save_s = 0;
  double restart_s = 0;
};
double young_interval_s(const CheckpointRestart& c);
double daly_interval_s(const CheckpointRestart& c);
// Useful time over expected time.
double goodput(const CheckpointRestart& c, double interval_s);

// Training continues from states in memory, on a smaller mesh until the lost
// devices are replaced. No finished step is lost, so that every step is as a
// checkpoint that costs no time: a failure costs the step so far, and its
// detection and recovery, which may fail themselves. In addition the share of
// the devices that is gone is missing for the time of the replacement, and the
// state's way to a replica costs a share of every step.
struct InMemoryRecovery {
  double mtbf_s = 0;
  double recover_s = 0;
  double step_s = 0;
  double lost_share = 0;     // of the devices
  double replace_s = 0;      // until there are as many again
  double replica_share = 0;  // of a step
};
double goodput(const InMemoryRecovery& r);

// The share of the mesh's devices that compute nothing while a node is missing:
// a data-parallel rank needs all of its devices.
double lost_share(int node_devices, const geometry::Layout& layout);

}  // namespace remesh::planner
