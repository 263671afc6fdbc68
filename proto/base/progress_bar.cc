#include "proto/base/progress_bar.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/base/text.h"

namespace remesh {
namespace {

constexpr int64_t kRedrawMs = 100;
constexpr size_t kWidth = 30;  // of the bar
constexpr size_t kLeastWidth = 8;

size_t columns_of_stderr() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0
             ? size.ws_col
             : 80;
}

}  // namespace

std::string progress_text(const std::string& what, const std::string& unit,
                          uint64_t done, uint64_t total, double seconds,
                          size_t columns) {
  const double share = total == 0
                           ? 1.0
                           : std::min(1.0, static_cast<double>(done) /
                                               static_cast<double>(total));
  const std::string percent = fmt::format("] {:>3.0f}%", share * 100);
  const std::string counts = fmt::format(
      "  {} of {}", unit.empty() ? format_bytes(done) : fmt::format("{}", done),
      unit.empty() ? format_bytes(total)
                   : plural(static_cast<int64_t>(total), unit));
  std::string speed, left;
  if (share > 0.02 && seconds > 0) {
    const double rate = static_cast<double>(done) / seconds;
    speed = fmt::format("  {}/s",
                        unit.empty() ? format_bytes(static_cast<uint64_t>(rate))
                                     : fmt::format("{:.1f}", rate));
    left = fmt::format("  {} left", format_duration(seconds / share - seconds));
  }
  // As much as the terminal has room for.
  std::string tail;
  size_t used = 0;
  for (const std::string& text :
       {fmt::format("{}{}{}{}", percent, counts, speed, left),
        fmt::format("{}{}{}", percent, counts, left),
        fmt::format("{}{}", percent, left), percent}) {
    tail = text;
    used = what.size() + 2 + tail.size();
    if (used + kLeastWidth <= columns) break;
  }
  const size_t width =
      std::clamp(columns - std::min(columns, used), kLeastWidth, kWidth);
  const auto full = static_cast<size_t>(share * static_cast<double>(width));
  return fmt::format("{} [{}{}{}", what, std::string(full, '='),
                     std::string(width - full, '.'), tail);
}

ProgressBar::ProgressBar(std::string what, std::string unit)
    : what_(std::move(what)),
      unit_(std::move(unit)),
      terminal_(isatty(STDERR_FILENO) == 1) {}

ProgressBar::~ProgressBar() {
  if (drawn_) std::fputs("\r\x1b[K", stderr);
}

void ProgressBar::show(uint64_t done, uint64_t total) {
  const int64_t now = monotonic_ms();
  if (!terminal_ || now - drawn_ms_ < kRedrawMs) return;
  if (began_ms_ == 0) began_ms_ = now;
  drawn_ms_ = now;
  drawn_ = true;
  print_error("\r\x1b[K" +
              progress_text(what_, unit_, done, total,
                            static_cast<double>(now - began_ms_) / 1000,
                            columns_of_stderr()));
}

}  // namespace remesh
