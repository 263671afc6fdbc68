// A study as one HTML page: tables, and charts as inline SVG.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "coordinator/ctl/study.h"

namespace remesh::ctl {
namespace {

using Series = StudyChart::Series;

constexpr double kWidth = 640, kHeight = 320;
constexpr double kLeft = 64, kRight = 16, kTop = 14, kBottom = 44;
constexpr const char* kColors[] = {"#2f6fde", "#d9602b", "#1f9d73",
                                   "#9a4fd0", "#b8860b", "#c2347b"};
const char* color(size_t i) { return kColors[i % std::size(kColors)]; }

constexpr const char* kTooLarge =
    "predicted to need more memory than a device has";
constexpr const char* kMark = "\u2020";  // a dagger

std::string escaped(const std::string& text) {
  static const std::map<char, std::string> kNames = {
      {'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'"', "&quot;"}};
  std::string out;
  for (const char c : text)
    out += kNames.contains(c) ? kNames.at(c) : std::string(1, c);
  return out;
}

std::string label(double x) {
  return std::fabs(x) >= 1e4 ? fmt::format("{:.4g}k", x / 1e3)
                             : fmt::format("{:.4g}", x);
}

std::string label_at(double x, double y, const char* anchor,
                     const std::string& text) {
  return fmt::format(
      "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}"
      "</text>\n",
      x, y, anchor, escaped(text));
}
std::string line_from(double x1, double y1, double x2, double y2,
                      const char* kind) {
  return fmt::format(
      "<line class=\"{}\" x1=\"{:.1f}\" y1=\"{:.1f}\" "
      "x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n",
      kind, x1, y1, x2, y2);
}

// Round numbers from `low` to `high`, about five.
std::vector<double> ticks(double low, double high) {
  const double rough = std::max(high - low, 1e-12) / 5;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = power;
  for (const double factor : {2.0, 5.0, 10.0})
    if (rough > step * 1.0001) step = factor * power;
  std::vector<double> out;
  for (double t = std::ceil(low / step) * step; t <= high + step / 1e6;
       t += step)
    out.push_back(std::fabs(t) < step / 1e6 ? 0 : t);
  return out;
}

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  void add(double x) {
    low = std::min(low, x);
    high = std::max(high, x);
  }
  double share(double x) const {
    return high > low ? (x - low) / (high - low) : 0.5;
  }
};

// Settings are doubled from point to point, so the x axis is logarithmic
// where all of them are positive.
class Plot {
 public:
  explicit Plot(const StudyChart& chart) : chart_(chart), log_(!chart.linear) {
    for (const Series& s : chart.series)
      for (const auto& [x, y] : s.points) log_ = log_ && x > 0;
    y_.add(0);
    for (const Series& s : chart.series)
      for (const auto& [x, y] : s.points) {
        x_.add(scaled(x));
        y_.add(y);
      }
    y_.high += 0.05 * (y_.high - y_.low);
  }

  std::string svg() const {
    std::string out = axes();
    for (size_t i = 0; i < chart_.series.size(); ++i)
      out += drawn(chart_.series[i], color(i));
    return fmt::format(
        "<svg viewBox=\"0 0 {} {}\" role=\"img\" "
        "aria-label=\"{}\">\n{}</svg>\n",
        kWidth, kHeight, escaped(chart_.title), out);
  }

 private:
  double scaled(double x) const { return log_ ? std::log2(x) : x; }
  double at_x(double x) const {
    return kLeft + x_.share(scaled(x)) * (kWidth - kLeft - kRight);
  }
  double at_y(double y) const {
    return kHeight - kBottom - y_.share(y) * (kHeight - kTop - kBottom);
  }

  std::string axes() const {
    std::string out;
    for (const double t : ticks(y_.low, y_.high)) {
      out += line_from(kLeft, at_y(t), kWidth - kRight, at_y(t), "grid");
      out += label_at(kLeft - 8, at_y(t) + 4, "end", label(t));
    }
    std::vector<double> values;
    for (const Series& s : chart_.series)
      for (const auto& [x, y] : s.points) values.push_back(x);
    std::sort(values.begin(), values.end());
    const bool whole = std::all_of(values.begin(), values.end(),
                                   [](double x) { return x == std::floor(x); });
    if (!log_ && !whole && x_.high - x_.low > 1e-6 * x_.high)
      values = ticks(x_.low, x_.high);
    double last = -kWidth;
    constexpr double kApart = 34;
    for (const double x : values) {
      if (at_x(x) - last < kApart) continue;
      last = at_x(x);
      out += label_at(last, kHeight - kBottom + 18, "middle", label(x));
    }
    out += line_from(kLeft, at_y(0), kWidth - kRight, at_y(0), "axis");
    return out +
           label_at((kLeft + kWidth) / 2, kHeight - 6, "middle", chart_.x);
  }

  std::string drawn(const Series& s, const char* stroke) const {
    std::string path, dots;
    for (const auto& [x, y] : s.points) {
      const bool too_large = std::ranges::count(s.too_large, x) > 0;
      if (too_large) dots += label_at(at_x(x), at_y(y) - 8, "middle", kMark);
      path += fmt::format("{:.1f},{:.1f} ", at_x(x), at_y(y));
      dots += fmt::format(
          "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\" fill=\"{}\" "
          "stroke=\"{}\"><title>{}: {:g}, {:.4g}{}</title></circle>\n",
          at_x(x), at_y(y), s.published ? 5 : 3,
          s.published || too_large ? "none" : stroke, stroke, escaped(s.name),
          x, y, too_large ? std::string(", ") + kTooLarge : "");
    }
    if (s.published) return dots;
    return fmt::format("<polyline points=\"{}\" stroke=\"{}\"/>\n", path,
                       stroke) +
           dots;
  }

  const StudyChart& chart_;
  bool log_;
  Range x_, y_;
};

// Stacked, one below the other; a single part may be negative.
std::string bars_svg(const StudyChart& c) {
  constexpr double kRow = 30, kName = 190, kValue = 70;
  Range range;
  range.add(0);
  const auto total = [](const StudyChart::Bar& bar) {
    double sum = 0;
    for (const double p : bar.parts) sum += p;
    return sum;
  };
  for (const auto& bar : c.bars) range.add(total(bar));
  const auto at = [&](double x) {
    return kName + kValue +
           range.share(x) * (kWidth - kName - 2 * kValue - kRight);
  };
  std::string out;
  for (size_t i = 0; i < c.bars.size(); ++i) {
    const double y = kTop + kRow * static_cast<double>(i);
    out += label_at(
        kName - 6, y + 17, "end",
        c.bars[i].name + (c.bars[i].too_large ? std::string(" ") + kMark : ""));
    double from = 0;
    for (size_t p = 0; p < c.bars[i].parts.size(); ++p) {
      const double to = from + c.bars[i].parts[p];
      out += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\" "
          "fill=\"{}\"><title>{}: {:.4g}</title></rect>\n",
          std::min(at(from), at(to)), y, std::fabs(at(to) - at(from)), kRow - 8,
          color(p), escaped(c.parts[p]), c.bars[i].parts[p]);
      from = to;
    }
    out += from < 0 ? label_at(at(from) - 6, y + 17, "end",
                               fmt::format("{:.1f}", from))
                    : label_at(at(from) + 6, y + 17, "start",
                               fmt::format("{:.1f}", from));
  }
  const double height = 2 * kTop + kRow * static_cast<double>(c.bars.size());
  out += line_from(at(0), kTop - 4, at(0), height - kTop, "axis");
  return fmt::format(
      "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n{}</svg>\n",
      kWidth, height, escaped(c.title), out);
}

std::string legend(const StudyChart& c) {
  std::string out = "<p class=\"legend\">";
  const auto add = [&](size_t i, const std::string& name, bool hollow) {
    out += fmt::format(
        "<span><i style=\"border-color:{0};background:{1}\"></i>{2}</span> ",
        color(i), hollow ? "none" : color(i), escaped(name));
  };
  for (size_t i = 0; i < c.series.size(); ++i)
    add(i, c.series[i].name, c.series[i].published);
  if (c.parts.size() > 1)
    for (size_t i = 0; i < c.parts.size(); ++i) add(i, c.parts[i], false);
  const auto marked = [](const Series& s) { return !s.too_large.empty(); };
  if (std::ranges::any_of(c.series, marked) ||
      std::ranges::any_of(c.bars, &StudyChart::Bar::too_large))
    out += fmt::format("<span>{} {}</span>", kMark, kTooLarge);
  return out + "</p>\n";
}

std::string cells(const std::vector<std::string>& texts, const char* tag) {
  std::string out = "<tr>";
  for (const std::string& t : texts)
    out += fmt::format("<{0}>{1}</{0}>", tag, escaped(t));
  return out + "</tr>\n";
}

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5d6675;
  --rule: #d9dee6; --paper: #fff; --yes: #1f7a4d; --no: #b3382c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa3b2;
  --rule: #39404c; --paper: #171b22; --yes: #58c08e; --no: #ef8a7d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); max-width: 1360px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; }
.source, .legend, figcaption span { color: var(--soft); }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 2rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0;
  border-bottom: 1px solid var(--rule); vertical-align: top; }
@media (max-width: 600px) { table { display: block; overflow-x: auto; } }
td.yes { color: var(--yes); font-weight: 600; }
td.no { color: var(--no); font-weight: 600; }
.charts { display: grid; gap: 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; }
figcaption span { font-weight: 400; }
svg { width: 100%; height: auto; font-size: 12px; }
svg text { fill: var(--soft); } svg polyline { fill: none; stroke-width: 2; }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); }
.legend span { margin-right: 1rem; white-space: nowrap; }
.legend i { display: inline-block; width: .7em; height: .7em;
  border: 2px solid; border-radius: 50%; margin-right: .35em; }
)";

}  // namespace

std::string study_page(const Study& s) {
  std::string out = fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width\">\n"
      "<title>{0}</title>\n<style>{1}</style>\n<h1>{0}</h1>\n"
      "<p class=\"source\">{2}</p>\n<p>{3}</p>\n",
      escaped(s.title), kStyle, escaped(s.source), escaped(s.note));
  if (!s.figures.empty()) {
    out += "<h2>Published figures beside the planner's</h2>\n<table>\n" +
           cells({"figure", "published", "planner", "unit", "error"}, "th");
    for (const StudyFigure& f : s.figures) out += cells(f.row(), "td");
    out += "</table>\n";
  }
  if (!s.claims.empty()) {
    out += "<h2>Claims</h2>\n<table>\n" +
           cells({"claim", "planner", "holds"}, "th");
    for (const StudyClaim& c : s.claims)
      out += fmt::format(
          "<tr><td>{0}</td><td>{1}</td><td class=\"{2}\">{2}</td></tr>\n",
          escaped(c.text), escaped(c.ours), c.holds ? "yes" : "no");
    out += "</table>\n";
  }
  out += "<div class=\"charts\">\n";
  for (const StudyChart& c : s.charts)
    out += fmt::format(
        "<figure><figcaption>{} <span>{}</span></figcaption>\n{}{}</figure>\n",
        escaped(c.title), escaped(c.y),
        c.bars.empty() ? Plot(c).svg() : bars_svg(c), legend(c));
  return out + "</div>\n</html>\n";
}

}  // namespace remesh::ctl
