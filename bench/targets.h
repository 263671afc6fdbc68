// Targets: what a benchmark promises, whether it was met, and the exit code.
//
// Every benchmark ends with `return targets.report(...)`: 0 if all targets are
// met or there are none, 1 if one is missed. With --smoke the program runs
// everything with tiny sizes, as CTest does on a machine with other load: then
// require() is judged, at_most() and at_least() are not.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

namespace remesh::bench {

constexpr int kExitMissed = 1;
constexpr int kExitUsage = 2;
constexpr int kExitFailed = 3;  // not measured

// Says on stderr of what it could not be measured and why; returns kExitFailed.
int failed(const std::string& what, const std::string& why);

class Targets {
 public:
  explicit Targets(bool smoke) : smoke_(smoke) {}

  // A figure that is not a number misses its limit.
  void at_most(const std::string& what, double limit, double actual);
  void at_least(const std::string& what, double limit, double actual);
  // What holds on any machine under any load: results agree, rows are complete.
  void require(const std::string& what, bool holds);
  // Prints one line per target; returns the exit code.
  int report(std::FILE* out = stdout) const;

 private:
  struct Target {
    std::string what, limit, actual;
    bool met;
  };
  bool smoke_;
  std::vector<Target> judged_;
  std::vector<std::string> broken_;  // requirements
};

}  // namespace remesh::bench
