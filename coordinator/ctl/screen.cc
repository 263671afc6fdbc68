#include "coordinator/ctl/screen.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace remesh::ctl {
namespace {

constexpr const char* kClearLine = "\r\x1b[K";

// Not fmt::print(), which throws when stdout is a closed pipe.
void print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

int terminal_width() {
  winsize size{};
  const bool known =
      ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : Style().width;
}

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    std::string text(value);
    std::transform(text.begin(), text.end(), text.begin(), [](char c) {
      return static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    });
    return text.find("UTF-8") != std::string::npos ||
           text.find("UTF8") != std::string::npos;
  }
  return false;
}

}  // namespace

bool stdout_is_terminal() { return isatty(STDOUT_FILENO) == 1; }

Style style_of_stdout() {
  Style style;
  style.unicode = locale_is_utf8();
  if (!stdout_is_terminal()) return style;
  const char* term = std::getenv("TERM");
  const char* no_color = std::getenv("NO_COLOR");
  style.color = term != nullptr && std::string(term) != "dumb" &&
                (no_color == nullptr || *no_color == '\0');
  style.width = terminal_width();
  return style;
}

void Screen::resize() {
  if (terminal_) style_.width = terminal_width();
}

void Screen::line(const std::string& text) {
  print((bottom_.empty() ? "" : kClearLine) + text + "\n" + bottom_);
}

void Screen::line(const std::string& text, Tone tone) {
  line(toned(text, tone, style_));
}

void Screen::bottom(const std::string& text) {
  if (!terminal_ || text == bottom_) return;
  print(kClearLine + text);
  bottom_ = text;
}

}  // namespace remesh::ctl
