// The loss curve of render.h.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "coordinator/ctl/render.h"

namespace remesh::ctl {
namespace {

using Points = std::vector<std::pair<int64_t, double>>;

// Rows of dots, the first on top: '*' or ' '.
using Canvas = std::vector<std::string>;

// The Braille character of 2 x 4 dots: U+2800 and a bit for each of them.
std::string braille(const Canvas& canvas, int cx, int cy) {
  static constexpr uint32_t kBits[4][2] = {
      {0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
  uint32_t bits = 0;
  for (int y = 0; y < 4; ++y) {
    for (int x = 0; x < 2; ++x) {
      if (canvas[cy * 4 + y][cx * 2 + x] == '*') bits |= kBits[y][x];
    }
  }
  if (bits == 0) return " ";
  return {'\xe2', static_cast<char>(0xa0 | (bits >> 6)),
          static_cast<char>(0x80 | (bits & 0x3f))};  // in UTF-8
}

// Mean of the points of each dot column; columns between two that have points
// are filled in on the straight line.
std::vector<std::optional<double>> columns_of(const Points& points,
                                              int columns) {
  const auto [first, last] = std::minmax_element(points.begin(), points.end());
  const double begin = static_cast<double>(first->first);
  const double span = std::max(1.0, static_cast<double>(last->first) - begin);
  std::vector<double> sum(columns, 0);
  std::vector<int> count(columns, 0);
  for (const auto& [step, loss] : points) {
    const double x = (static_cast<double>(step) - begin) / span;
    const int c = std::min(columns - 1, static_cast<int>(x * columns));
    sum[c] += loss;
    ++count[c];
  }
  std::vector<std::optional<double>> out(columns);
  int before = -1;
  for (int c = 0; c < columns; ++c) {
    if (count[c] == 0) continue;
    out[c] = sum[c] / count[c];
    for (int k = before + 1; before >= 0 && k < c; ++k) {
      out[k] =
          *out[before] + (*out[c] - *out[before]) * (k - before) / (c - before);
    }
    before = c;
  }
  return out;
}

// Draws the columns as a line: each dot is joined to the one before it.
void draw(const std::vector<std::optional<double>>& values, double low,
          double high, Canvas* canvas) {
  const int rows = static_cast<int>(canvas->size());
  std::optional<int> before;
  for (int c = 0; c < static_cast<int>(values.size()); ++c) {
    if (!values[c]) continue;
    const double y = (high - *values[c]) / (high - low);
    const int row =
        std::clamp(static_cast<int>(std::lround(y * (rows - 1))), 0, rows - 1);
    int from = row;
    int to = row;
    if (before && *before < row) from = *before + 1;
    if (before && *before > row) to = *before - 1;
    for (int r = std::min(from, row); r <= std::max(to, row); ++r)
      (*canvas)[r][c] = '*';
    before = row;
  }
}

}  // namespace

std::vector<std::string> loss_curve(const Points& all, int width, int height,
                                    bool unicode) {
  Points points;
  std::copy_if(all.begin(), all.end(), std::back_inserter(points),
               [](const auto& p) { return std::isfinite(p.second); });
  constexpr int kLabel = 8;  // "  2.1345"
  const int columns = width - kLabel - 2;
  if (points.empty() || columns < 4 || height < 2) return {};
  // Dots of a character.
  const int across = unicode ? 2 : 1;
  const int down = unicode ? 4 : 1;
  const auto values = columns_of(points, columns * across);
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  for (const auto& v : values) {
    if (v) low = std::min(low, *v), high = std::max(high, *v);
  }
  if (high - low < 1e-9) high += 0.5, low -= 0.5;
  Canvas canvas(height * down, std::string(columns * across, ' '));
  draw(values, low, high, &canvas);

  std::vector<std::string> lines;
  for (int y = 0; y < height; ++y) {
    std::string line(kLabel, ' ');
    if (y == 0) line = fmt::format("{:>{}.4f}", high, kLabel);
    if (y == height - 1) line = fmt::format("{:>{}.4f}", low, kLabel);
    line += unicode ? " \u2502" : " |";
    if (!unicode) line += canvas[y];
    for (int x = 0; unicode && x < columns; ++x) line += braille(canvas, x, y);
    line.erase(line.find_last_not_of(' ') + 1);
    lines.push_back(line);
  }
  const auto [first, last] = std::minmax_element(points.begin(), points.end());
  const std::string left = fmt::format("step {}", first->first);
  const std::string right = fmt::format("{}", last->first);
  const int gap =
      std::max<int>(1, columns - static_cast<int>(left.size() + right.size()));
  lines.push_back(std::string(kLabel + 2, ' ') + left + std::string(gap, ' ') +
                  right);
  return lines;
}

}  // namespace remesh::ctl
