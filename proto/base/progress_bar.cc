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

ProgressBar::ProgressBar(std::string what)
    : what_(std::move(what)), terminal_(isatty(STDERR_FILENO) == 1) {}

ProgressBar::~ProgressBar() {
  if (drawn_) std::fputs("\r\x1b[K", stderr);
}

void ProgressBar::show(uint64_t done, uint64_t total) {
  const int64_t now = monotonic_ms();
  if (!terminal_ || now - drawn_ms_ < kRedrawMs) return;
  if (began_ms_ == 0) began_ms_ = now;
  drawn_ms_ = now;
  drawn_ = true;
  const double share = total == 0
                           ? 1.0
                           : std::min(1.0, static_cast<double>(done) /
                                               static_cast<double>(total));
  const int full = static_cast<int>(share * kWidth);
  std::string speed;
  if (share > 0.02 && now > began_ms_) {
    const double seconds = static_cast<double>(now - began_ms_) / 1000;
    speed = fmt::format("  {}/s  {} left",
                        format_bytes(static_cast<uint64_t>(
                            static_cast<double>(done) / seconds)),
                        format_duration(seconds / share - seconds));
  }
  print_error(fmt::format("\r\x1b[K{} [{}{}] {:>3.0f}%  {} of {}{}", what_,
                          std::string(static_cast<size_t>(full), '='),
                          std::string(static_cast<size_t>(kWidth - full), '.'),
                          share * 100, format_bytes(done), format_bytes(total),
                          speed));
}

}  // namespace remesh
