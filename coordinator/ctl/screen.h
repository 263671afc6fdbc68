// Output of `remesh run` to stdout: lines, and on a terminal one line at the
// bottom that is redrawn. Threads: one.
#pragma once

#include <string>

#include "coordinator/ctl/render.h"

namespace remesh::ctl {

// Style of stdout: the terminal's width, UTF-8 if the locale's variables say
// so, colors unless NO_COLOR is set.
Style style_of_stdout();
// Whether it is one on which the cursor can be moved; not if TERM is dumb.
bool stdout_is_terminal();

// Rows and columns of the terminal; 24 x 80 if they are unknown.
struct TerminalSize {
  int rows = 24, columns = 80;
};
TerminalSize terminal_size();

// While it lives, keys of the terminal are read one by one, without echo.
class Keys {
 public:
  Keys();
  ~Keys();
  Keys(const Keys&) = delete;
  Keys& operator=(const Keys&) = delete;
  // Waits for a key; 0 if none is pressed in that time. Ctrl-C is '\x03'.
  char wait(int timeout_ms);

 private:
  bool reads_ = false;  // stdin is a terminal
};

class Screen {
 public:
  Screen() = default;
  ~Screen() { bottom(""); }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  const Style& style() const { return style_; }
  bool is_terminal() const { return terminal_; }
  // Reads the width of the terminal again.
  void resize();
  void line(const std::string& text);
  void line(const std::string& text, Tone tone);
  // Sets the bottom line, on a terminal only; "" removes it.
  void bottom(const std::string& text);

 private:
  bool terminal_ = stdout_is_terminal();
  Style style_ = style_of_stdout();
  std::string bottom_;
  bool told_lost_ = false;  // that nobody sees the output
};

}  // namespace remesh::ctl
