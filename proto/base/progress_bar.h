// ProgressBar: how far a long command is, on stderr if that is a terminal.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace remesh {

// The bar as text, with the rate and the time left where they can be known and
// a terminal of that many columns, at least 40, has room for them. `unit`: what
// is counted, "token"; "": bytes.
std::string progress_text(const std::string& what, const std::string& unit,
                          uint64_t done, uint64_t total, double seconds,
                          size_t columns);

class ProgressBar {
 public:
  explicit ProgressBar(std::string what, std::string unit = "");
  // Removes the bar.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // Draws it, at most ten times a second.
  void show(uint64_t done, uint64_t total);

 private:
  std::string what_, unit_;
  bool terminal_ = false;
  bool drawn_ = false;
  int64_t began_ms_ = 0;
  int64_t drawn_ms_ = 0;
};

}  // namespace remesh
