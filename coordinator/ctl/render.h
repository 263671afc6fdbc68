// The texts that `remesh run` prints during a run, as pure functions: no
// terminal, clock or file, so that tests compare complete texts.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "proto/control.pb.h"
#include "proto/rundir/events.h"

namespace remesh::ctl {

// Capabilities of the terminal.
struct Style {
  bool unicode = false;  // UTF-8: block and Braille characters
  bool color = false;
  int width = 0;  // 0: not a terminal, lines are as long as they are
};

using events::Tone;
// The text in the tone's color if the style has colors.
std::string toned(const std::string& text, Tone tone, const Style& style);

// "41.2k", "3.14M", "512".
std::string short_number(double value);

// One finished step: "step  120/500  loss 2.1345  |g| 0.850  ...", without its
// less important figures if they do not fit into `width` columns (0: all).
std::string step_line(const pb::StepMetrics& m, int64_t steps, int width);

// One event without its time: "worker w1 joined: 2 slots on vm".
std::string event_text(const pb::EventRecord& e);
// Bottom line of a terminal: bar, percentage, step, loss, time left (omitted if
// negative). At most as wide as the style.
struct Progress {
  int64_t step = 0;
  int64_t steps = 0;
  double loss = 0;
  double elapsed_s = -1;  // since the run was started or resumed
  double left_s = -1;
  std::string note;  // replaces the loss while training is stopped
};
std::string progress_line(const Progress& p, const Style& style);

// A curve of (step, loss) of `width` x `height` characters including the axis,
// as lines without '\n', in Braille dots or plain ASCII. Points that are not
// finite are skipped; a column with several points shows their mean.
std::vector<std::string> loss_curve(
    const std::vector<std::pair<int64_t, double>>& points, int width,
    int height, bool unicode);

// Columns that a terminal needs for a UTF-8 text: one per code point, none for
// escape sequences.
size_t display_width(std::string_view text);

// The text with each line of more than `columns` columns (0: none) continued on
// further lines, indented to its second column if that begins in the left half.
// Words are not divided. Escape sequences take no room.
std::string fold(const std::string& text, int columns);

// The first `rows` lines of a text, each cut to `columns` characters. Escape
// sequences take no room and are kept. `last` replaces the last row.
std::string fit(const std::string& text, int columns, int rows,
                const std::string& last);

}  // namespace remesh::ctl
