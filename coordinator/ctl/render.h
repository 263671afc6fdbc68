// What `remesh run` shows of a run as it goes, as pure functions: no terminal,
// clock or file here, so tests compare whole texts.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "proto/control.pb.h"

namespace remesh::ctl {

// What the terminal can show.
struct Style {
  bool unicode = false;  // UTF-8: block and Braille characters
  bool color = false;
  int width = 80;
};

enum class Tone { kPlain, kGood, kNotice, kBad, kFaint };
// The text in that tone's color, or as it is.
std::string toned(const std::string& text, Tone tone, const Style& style);

// "41.2k", "3.14M", "512".
std::string short_number(double value);

// One finished step: "step  120/500  loss 2.1345  |g| 0.850  ...".
std::string step_line(const pb::StepMetrics& m, int64_t steps);

// One event in words, without its time: "worker w1 joined: 2 slots on vm".
std::string event_text(const pb::EventRecord& e);
Tone event_tone(const pb::EventRecord& e);
// "16:18:10", local time.
std::string clock_text(double unix_s);

// Bottom line of a terminal: bar, share, step, loss, time left (left out when
// negative). Not longer than the style's width.
struct Progress {
  int64_t step = 0;
  int64_t steps = 0;
  double loss = 0;
  double left_s = -1;
  std::string note;  // instead of the loss, when the training stands
};
std::string progress_line(const Progress& p, const Style& style);

// A curve of (step, loss), `width` x `height` characters with its axis, as
// lines without '\n'. Points that are not finite are left out; columns with
// several points show their mean. Braille dots or plain ASCII.
std::vector<std::string> loss_curve(
    const std::vector<std::pair<int64_t, double>>& points, int width,
    int height, bool unicode);

// Characters a terminal shows of a UTF-8 text (every code point counts one).
size_t display_width(const std::string& text);

}  // namespace remesh::ctl
