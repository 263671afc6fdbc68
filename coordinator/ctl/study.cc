#include "coordinator/ctl/study.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "coordinator/ctl/status_view.h"
#include "coordinator/ctl/study_run.h"
#include "proto/base/json_output.h"
#include "proto/base/json_reader.h"

namespace remesh::ctl {
namespace {

using nlohmann::json;

// What an object of a study is called in errors.
std::string label_of(const json& object) {
  for (const char* key : {"text", "title", "name"})
    if (object.is_object() && object.contains(key) &&
        object.at(key).is_string())
      return fmt::format("'{}'", object.at(key).get<std::string>());
  return "";
}

bool is_number(const json& j) { return j.is_number(); }
bool is_text(const json& j) { return j.is_string(); }
bool is_point(const json& j) {
  return j.is_array() && j.size() == 2 && is_number(j[0]) && is_number(j[1]);
}

class Evaluation {
 public:
  explicit Evaluation(const json& file) : file_(file) {}

  // A value that cannot be read is the reason of what goes wrong afterwards.
  Result<Study> run() {
    auto study = evaluate();
    RETURN_IF_ERROR(problem_);
    return study;
  }

 private:
  Result<Study> evaluate() {
    RETURN_IF_ERROR(check_sections());
    Study out;
    out.title = text_at(file_, "title");
    out.source = text_at(file_, "source");
    out.note = text_at(file_, "note", "");
    for (const json& f : list("figures")) {
      ASSIGN_OR_RETURN(const double ours, value_of(f));
      if (number_at(f, "published") == 0 && !f.contains("over"))
        return invalid_argument(fmt::format(
            "figure '{}': published = 0: must not be 0 without \"over\"",
            text_at(f, "text")));
      out.figures.push_back({.text = text_at(f, "text"),
                             .unit = text_at(f, "unit"),
                             .published = number_at(f, "published"),
                             .ours = ours,
                             .is_difference = f.contains("over")});
    }
    for (const json& c : list("claims")) {
      ASSIGN_OR_RETURN(StudyClaim claim, claim_of(c));
      out.claims.push_back(std::move(claim));
    }
    for (const json& c : list("charts")) {
      ASSIGN_OR_RETURN(StudyChart chart,
                       c.contains("bars") ? bars_of(c) : lines_of(c));
      out.charts.push_back(std::move(chart));
    }
    return out;
  }

  // Values of the file. The first problem is kept; what is returned then means
  // nothing.
  template <typename Read>
  auto read(const json& object, const Read& value) {
    JsonReader reader(object, &object == &file_ ? "" : label_of(object));
    auto out = value(reader);
    if (problem_.ok()) problem_ = reader.problem();
    return out;
  }
  std::string text_at(const json& object, const char* key,
                      const char* absent = nullptr) {
    return read(object, [&](auto& r) { return r.text(key, absent); });
  }
  double number_at(const json& object, const char* key) {
    return read(object, [&](auto& r) { return r.number(key, 0); });
  }
  // Of elements that `is_element` accepts and `elements` describes.
  json array_at(
      const json& object, const char* key, const char* elements = "",
      bool (*is_element)(const json&) = [](const json&) { return true; }) {
    return read(object, [&](JsonReader& r) -> json {
      const json& array = r.array(key);
      if (std::all_of(array.begin(), array.end(), is_element)) return array;
      r.refuse(key, elements);
      return json::array();
    });
  }
  json object_at(const json& object, const char* key) {
    return read(object, [&](JsonReader& r) -> json {
      const json* found = r.find(key);
      if (found != nullptr && found->is_object()) return *found;
      r.refuse(key, "an object");
      return json::object();
    });
  }

  Status check_sections() const {
    const auto has = [&](const char* key) {
      return file_.contains(key) && !file_.at(key).empty();
    };
    if (!has("figures") && !has("claims") && !has("charts"))
      return invalid_argument("must have figures, claims or charts");
    return ok_status();
  }
  json list(const char* key) {
    return file_.contains(key) ? array_at(file_, key) : json::array();
  }

  // Those of a run replace those of its base.
  Status settings_of(std::string name, json* out) {
    const json runs = object_at(file_, "runs");
    for (std::set<std::string> seen;; name = text_at(runs.at(name), "base")) {
      if (!runs.contains(name)) return not_found("no run is called " + name);
      if (!seen.insert(name).second)
        return invalid_argument("run " + name + ": its bases form a cycle");
      const json run = object_at(runs, name.c_str());
      out->insert(run.begin(), run.end());  // what is not there yet
      if (!run.contains("base")) break;
    }
    out->erase("base");
    return ok_status();
  }

  Result<StudyRun> predict(const std::string& name,
                           const json& changes = json::object()) {
    json settings = json::object();
    RETURN_IF_ERROR(settings_of(name, &settings));
    settings.update(changes);
    return runs_.predict(settings).with_context("run " + name);
  }

  Result<double> metric(const std::string& run, const std::string& name) {
    ASSIGN_OR_RETURN(const StudyRun predicted, predict(run));
    return study_metric(predicted, name);
  }
  // Percent by which the metric of `run` is larger.
  Result<double> larger(const json& of, const std::string& name) {
    ASSIGN_OR_RETURN(const double a, metric(text_at(of, "run"), name));
    ASSIGN_OR_RETURN(const double b, metric(text_at(of, "over"), name));
    ASSIGN_OR_RETURN(const double ratio, ratio_of(a, b, name));
    return 100 * (ratio - 1);
  }
  static Result<double> ratio_of(double a, double b, const std::string& name) {
    if (b == 0)
      return invalid_argument(name +
                              " is 0, and nothing is a percentage of it");
    return a / b;
  }
  Result<double> value_of(const json& of) {
    const std::string name = text_at(of, "metric");
    return of.contains("over") ? larger(of, name)
                               : metric(text_at(of, "run"), name);
  }

  Result<StudyClaim> claim_of(const json& c) {
    StudyClaim out{.text = text_at(c, "text"), .ours = "", .holds = true};
    if (c.contains("beyond")) {
      const std::string name = text_at(c, "metric");
      ASSIGN_OR_RETURN(const double ours, larger(c, name));
      ASSIGN_OR_RETURN(const double other,
                       larger(object_at(c, "beyond"), name));
      out.holds = std::fabs(ours) > std::fabs(other);
      out.ours = fmt::format("{:+.1f} % against {:+.1f} %", ours, other);
      return out;
    }
    if (!c.contains("least") && !c.contains("most"))
      return invalid_argument(
          fmt::format("claim '{}': must have least, most or beyond", out.text));
    ASSIGN_OR_RETURN(const double ours, value_of(c));
    const std::string unit = c.contains("over")   ? " %"
                             : c.contains("unit") ? " " + text_at(c, "unit")
                                                  : "";
    out.ours = fmt::format("{:.4g}{}", ours, unit);
    if (c.contains("least")) {
      const double least = number_at(c, "least");
      out.holds = ours >= least;
      out.ours += fmt::format(", at least {:g}{}", least, unit);
    }
    if (c.contains("most")) {
      const double most = number_at(c, "most");
      out.holds = out.holds && ours <= most;
      out.ours += fmt::format(", at most {:g}{}", most, unit);
    }
    return out;
  }

  Result<StudyChart> lines_of(const json& c) {
    StudyChart out;
    out.title = text_at(c, "title");
    out.x = text_at(c, "x");
    out.y = text_at(c, "y");
    const bool relative =
        read(c, [](auto& r) { return r.flag("relative", false); });
    for (const json& s : array_at(c, "series")) {
      StudyChart::Series line;
      line.name = text_at(s, "name");
      line.published = s.contains("published");
      if (line.published) {
        for (const json& p :
             array_at(s, "published", "pairs of numbers", is_point))
          line.points.emplace_back(p[0].get<double>(), p[1].get<double>());
      } else {
        RETURN_IF_ERROR(vary(s, text_at(c, "metric"), &line));
        if (relative)
          RETURN_IF_ERROR(make_relative(text_at(c, "metric"), &line));
      }
      out.series.push_back(std::move(line));
    }
    return out;
  }

  Status vary(const json& s, const std::string& name,
              StudyChart::Series* line) {
    json changes = s.contains("set") ? object_at(s, "set") : json::object();
    for (const json& value : array_at(s, "values", "numbers", is_number)) {
      changes[text_at(s, "vary")] = value;
      ASSIGN_OR_RETURN(const StudyRun run, predict(text_at(s, "run"), changes));
      ASSIGN_OR_RETURN(const double y, study_metric(run, name));
      line->points.emplace_back(value.get<double>(), y);
      if (run.too_large) line->too_large.push_back(value.get<double>());
    }
    return ok_status();
  }
  static Status make_relative(const std::string& name,
                              StudyChart::Series* line) {
    if (line->points.empty()) return ok_status();
    const double first = line->points[0].second;
    for (auto& point : line->points) {
      ASSIGN_OR_RETURN(const double ratio, ratio_of(point.second, first, name));
      point.second = 100 * ratio;
    }
    return ok_status();
  }

  Result<StudyChart> bars_of(const json& c) {
    StudyChart out;
    out.title = text_at(c, "title");
    out.y = text_at(c, "y");
    const std::string kind = text_at(c, "bars");
    if (kind == "memory") {
      for (const MemoryPurpose& m : kMemoryPurposes) out.parts.push_back(m.key);
      for (const json& name : array_at(c, "runs", "names of runs", is_text)) {
        ASSIGN_OR_RETURN(const StudyRun run, predict(name.get<std::string>()));
        StudyChart::Bar bar{.name = name.get<std::string>(),
                            .parts = {},
                            .too_large = run.too_large};
        for (const MemoryPurpose& m : kMemoryPurposes)
          bar.parts.push_back(static_cast<double>(run.plan.memory.*m.bytes) /
                              1e9);
        out.bars.push_back(std::move(bar));
      }
      return out;
    }
    if (kind != "effect")
      return invalid_argument("bars = '" + kind +
                              "': must be memory or effect");
    out.parts = {"change"};
    const std::string of = text_at(c, "metric"), base_run = text_at(c, "run");
    ASSIGN_OR_RETURN(const double base, metric(base_run, of));
    for (const json& change : array_at(c, "changes")) {
      ASSIGN_OR_RETURN(const StudyRun run,
                       predict(base_run, object_at(change, "set")));
      ASSIGN_OR_RETURN(const double y, study_metric(run, of));
      ASSIGN_OR_RETURN(const double ratio, ratio_of(y, base, of));
      out.bars.push_back({.name = text_at(change, "name"),
                          .parts = {100 * (ratio - 1)},
                          .too_large = run.too_large});
    }
    return out;
  }

  const json& file_;
  StudyRuns runs_;
  Status problem_;
};

}  // namespace

Result<Study> evaluate_study(const std::string& text,
                             const std::string& where) {
  const json file = json::parse(text, nullptr, false);
  if (!file.is_object())
    return invalid_argument(where + ": is not a JSON object");
  return Evaluation(file).run().with_context(where);
}

std::vector<std::string> StudyFigure::row() const {
  return {text, fmt::format("{:g}", published), fmt::format("{:.4g}", ours),
          unit,
          fmt::format("{:+.1f} {}", error(), is_difference ? "points" : "%")};
}

std::string study_text(const Study& s) {
  std::string out = fmt::format("{}\n{}\n", s.title, s.source);
  if (!s.note.empty()) out += s.note + "\n";
  std::vector<std::vector<std::string>> rows = {
      {"figure", "published", "ours", "unit", "error"}};
  for (const StudyFigure& f : s.figures) rows.push_back(f.row());
  out += "\n" + table(std::move(rows));
  rows = {{"claim", "ours", "holds"}};
  size_t held = 0;
  for (const StudyClaim& c : s.claims) {
    rows.push_back({c.text, c.ours, c.holds ? "yes" : "no"});
    held += c.holds ? 1 : 0;
  }
  out += "\n" + table(std::move(rows));
  double error = 0;
  int absolute = 0;
  for (const StudyFigure& f : s.figures)
    if (!f.is_difference) {
      error += std::fabs(f.error());
      ++absolute;
    }
  return out + fmt::format(
                   "\n{} of {} claims hold; mean error {:.1f} % of {} "
                   "figures\n",
                   held, s.claims.size(), absolute > 0 ? error / absolute : 0.0,
                   absolute);
}

std::string study_json(const Study& s) {
  using Json = nlohmann::ordered_json;
  Json figures = Json::array(), claims = Json::array(), charts = Json::array();
  for (const StudyFigure& f : s.figures)
    figures.push_back({{"text", f.text},
                       {"unit", f.unit},
                       {"published", f.published},
                       {"ours", f.ours},
                       {"error", f.error()}});
  for (const StudyClaim& c : s.claims)
    claims.push_back({{"text", c.text}, {"ours", c.ours}, {"holds", c.holds}});
  for (const StudyChart& c : s.charts) {
    Json series = Json::array();
    for (const auto& line : c.series)
      series.push_back({{"name", line.name},
                        {"points", line.points},
                        {"too_large", line.too_large}});
    for (const auto& bar : c.bars)
      series.push_back({{"name", bar.name},
                        {"parts", bar.parts},
                        {"too_large", bar.too_large}});
    charts.push_back({{"title", c.title}, {"series", std::move(series)}});
  }
  return json_output({{"title", s.title},
                      {"source", s.source},
                      {"figures", std::move(figures)},
                      {"claims", std::move(claims)},
                      {"charts", std::move(charts)}});
}

}  // namespace remesh::ctl
