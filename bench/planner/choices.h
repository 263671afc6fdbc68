// The planner's choices on this machine beside what real runs take. Each
// function prints its table, its targets and a last line that sums it up, and
// returns the exit code.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace remesh::bench {

struct ChoiceOptions {
  std::string model = "42m";  // of options.h
  int batch = 8;              // sequences of a step
  int seq = 256;
  int ranks = 4;   // at most
  int steps = 8;   // of a run; the first two do not count
  int rounds = 3;  // runs of a setting
  int layouts = 12;
  uint64_t seed = 1;
  std::vector<std::string> fixed = {"threads", "cp"};  // knobs of the tuner
  bool smoke = false;
};

// Random settings, predicted and measured.
int compare_layouts(const ChoiceOptions& options);
// The mesh that is chosen for one host and for two with a slow link, on both.
int compare_hosts(const ChoiceOptions& options);
// `remesh tune` against a sweep of all settings.
int compare_tuner(const ChoiceOptions& options);

}  // namespace remesh::bench
