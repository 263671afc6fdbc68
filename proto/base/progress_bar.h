// ProgressBar: how far a long command is, on stderr if that is a terminal.
//
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <string>

namespace remesh {

class ProgressBar {
 public:
  explicit ProgressBar(std::string what);
  // Removes the bar.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // Draws it, at most ten times a second, with the rate and the time left.
  void show(uint64_t done_bytes, uint64_t total_bytes);

 private:
  std::string what_;
  bool terminal_ = false;
  bool drawn_ = false;
  int64_t began_ms_ = 0;
  int64_t drawn_ms_ = 0;
};

}  // namespace remesh
