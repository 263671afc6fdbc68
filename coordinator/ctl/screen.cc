#include "coordinator/ctl/screen.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "proto/base/exit_code.h"

namespace remesh::ctl {
namespace {

constexpr const char* kClearLine = "\r\x1b[K";

// Not fmt::print(), which throws when stdout is a closed pipe.
void print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
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

termios g_mode;  // of the terminal, before Keys

void restore_and_die(int signal) {
  tcsetattr(STDIN_FILENO, TCSANOW, &g_mode);
  std::signal(signal, SIG_DFL);
  (void)std::raise(signal);
}

}  // namespace

TerminalSize terminal_size() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0)
    return {};
  return {.rows = size.ws_row, .columns = size.ws_col};
}

Keys::Keys() {
  reads_ = isatty(STDIN_FILENO) == 1 && tcgetattr(STDIN_FILENO, &g_mode) == 0;
  if (!reads_) return;
  for (const int signal : {SIGTERM, SIGHUP})
    std::signal(signal, restore_and_die);
  termios mode = g_mode;
  mode.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO | ISIG);
  tcsetattr(STDIN_FILENO, TCSANOW, &mode);
}

Keys::~Keys() {
  if (reads_) tcsetattr(STDIN_FILENO, TCSANOW, &g_mode);
}

char Keys::wait(int timeout_ms) {
  pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
  char key = 0;
  // Without a terminal, stdin may be closed: then only the time passes.
  if (poll(&input, reads_ ? 1 : 0, timeout_ms) == 1 &&
      read(STDIN_FILENO, &key, 1) != 1)
    return '\x03';
  return key;
}

bool stdout_is_terminal() {
  const char* term = std::getenv("TERM");
  return isatty(STDOUT_FILENO) == 1 &&
         (term == nullptr || std::string_view(term) != "dumb");
}

Style style_of_stdout() {
  Style style;
  style.unicode = locale_is_utf8();
  if (!stdout_is_terminal()) return style;
  const char* term = std::getenv("TERM");
  const char* no_color = std::getenv("NO_COLOR");
  style.color = term != nullptr && (no_color == nullptr || *no_color == '\0');
  style.width = terminal_size().columns;
  return style;
}

void Screen::resize() {
  if (terminal_) style_.width = terminal_size().columns;
}

void Screen::line(const std::string& text) {
  print((bottom_.empty() ? "" : kClearLine) + text + "\n" + bottom_);
  if (std::ferror(stdout) == 0 || std::exchange(told_lost_, true)) return;
  print_error(
      "remesh: the output cannot be written any more; training continues, see "
      "`remesh status`\n");
}

void Screen::line(const std::string& text, Tone tone) {
  line(toned(fold(text, style_.width), tone, style_));
}

void Screen::bottom(const std::string& text) {
  if (!terminal_ || text == bottom_) return;
  print(kClearLine + text);
  bottom_ = text;
}

}  // namespace remesh::ctl
