// The terminal, or the pipe: lines that stay, and on a terminal one line at the
// bottom that is redrawn. Writes to stdout; one thread.
#pragma once

#include <string>

#include "coordinator/ctl/render.h"

namespace remesh::ctl {

// What stdout is: a terminal of which width, UTF-8 by the locale's variables,
// colors unless NO_COLOR is set or TERM is dumb.
Style style_of_stdout();
bool stdout_is_terminal();

class Screen {
 public:
  Screen(bool terminal, Style style) : terminal_(terminal), style_(style) {}
  ~Screen() { bottom(""); }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  const Style& style() const { return style_; }
  // Takes the terminal's present width.
  void resize();
  void line(const std::string& text, Tone tone = Tone::kPlain);
  // On a terminal only; "" takes it away.
  void bottom(const std::string& text);
  void flush();

 private:
  bool terminal_;
  Style style_;
  std::string bottom_;
};

}  // namespace remesh::ctl
