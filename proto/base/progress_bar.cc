#include "proto/base/progress_bar.h"

#include <fmt/format.h>
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
constexpr int kWidth = 30;

}  // namespace

std::string progress_text(const std::string& what, const std::string& unit,
                          uint64_t done, uint64_t total, double seconds) {
  const double share = total == 0
                           ? 1.0
                           : std::min(1.0, static_cast<double>(done) /
                                               static_cast<double>(total));
  const auto full = static_cast<size_t>(share * kWidth);
  std::string speed;
  if (share > 0.02 && seconds > 0) {
    const double rate = static_cast<double>(done) / seconds;
    speed = fmt::format("  {}/s  {} left",
                        unit.empty() ? format_bytes(static_cast<uint64_t>(rate))
                                     : fmt::format("{:.1f}", rate),
                        format_duration(seconds / share - seconds));
  }
  return fmt::format(
      "{} [{}{}] {:>3.0f}%  {} of {}{}", what, std::string(full, '='),
      std::string(kWidth - full, '.'), share * 100,
      unit.empty() ? format_bytes(done) : fmt::format("{}", done),
      unit.empty() ? format_bytes(total)
                   : plural(static_cast<int64_t>(total), unit),
      speed);
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
                            static_cast<double>(now - began_ms_) / 1000));
}

}  // namespace remesh
