#include "coordinator/ctl/study.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "coordinator/ctl/status_view.h"
#include "coordinator/ctl/study_run.h"
#include "proto/base/json_output.h"

namespace remesh::ctl {
namespace {

using nlohmann::json;

// Reads a value of a file that someone wrote. Throws json::exception if the key
// is missing or has another type; evaluate_study() catches it.
std::string text_at(const json& object, const char* key) {
  return object.at(key).get<std::string>();
}
double number_at(const json& object, const char* key) {
  return object.at(key).get<double>();
}

class Evaluation {
 public:
  explicit Evaluation(const json& file) : file_(file) {}

  Result<Study> run() {
    RETURN_IF_ERROR(check_sections());
    Study out;
    out.title = text_at(file_, "title");
    out.source = text_at(file_, "source");
    out.note = file_.value("note", "");
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

 private:
  Status check_sections() const {
    const auto has = [&](const char* key) {
      return file_.contains(key) && !file_.at(key).empty();
    };
    if (file_.contains("runs") && !file_.at("runs").is_object())
      return invalid_argument("runs: must be an object");
    for (const char* key : {"figures", "claims", "charts"})
      if (file_.contains(key) && !file_.at(key).is_array())
        return invalid_argument(fmt::format("{}: must be a list", key));
    if (!has("figures") && !has("claims") && !has("charts"))
      return invalid_argument("must have figures, claims or charts");
    return ok_status();
  }
  json list(const char* key) const {
    return file_.contains(key) ? file_.at(key) : json::array();
  }

  // Those of a run replace those of its base.
  Status settings_of(std::string name, json* out) const {
    const json& runs = file_.at("runs");
    for (std::set<std::string> seen;; name = text_at(runs.at(name), "base")) {
      if (!runs.contains(name)) return not_found("no run is called " + name);
      if (!seen.insert(name).second)
        return invalid_argument("run " + name + ": its bases form a cycle");
      const json& run = runs.at(name);
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
    auto run = runs_.predict(settings);
    if (!run.ok()) return run.status().with_context("run " + name);
    return run;
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
    ASSIGN_OR_RETURN(const double ours, value_of(c));
    const char* unit = c.contains("over") ? " %" : "";
    if (c.contains("beyond")) {
      ASSIGN_OR_RETURN(const double other,
                       larger(c.at("beyond"), text_at(c, "metric")));
      out.holds = std::fabs(ours) > std::fabs(other);
      out.ours = fmt::format("{:+.1f} % against {:+.1f} %", ours, other);
      return out;
    }
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
    for (const json& s : c.at("series")) {
      StudyChart::Series line;
      line.name = text_at(s, "name");
      line.published = s.contains("published");
      if (line.published) {
        for (const json& p : s.at("published"))
          line.points.emplace_back(p.at(0).get<double>(),
                                   p.at(1).get<double>());
      } else {
        RETURN_IF_ERROR(vary(s, text_at(c, "metric"), &line));
        if (c.value("relative", false))
          RETURN_IF_ERROR(make_relative(text_at(c, "metric"), &line));
      }
      out.series.push_back(std::move(line));
    }
    return out;
  }

  Status vary(const json& s, const std::string& name,
              StudyChart::Series* line) {
    json changes = s.contains("set") ? s.at("set") : json::object();
    for (const json& value : s.at("values")) {
      changes[text_at(s, "vary")] = value;
      ASSIGN_OR_RETURN(const StudyRun run, predict(text_at(s, "run"), changes));
      ASSIGN_OR_RETURN(const double y, study_metric(run, name));
      line->points.emplace_back(value.get<double>(), y);
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
      for (const json& name : c.at("runs")) {
        ASSIGN_OR_RETURN(const StudyRun run, predict(name.get<std::string>()));
        StudyChart::Bar bar{.name = name.get<std::string>(), .parts = {}};
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
    for (const json& change : c.at("changes")) {
      ASSIGN_OR_RETURN(const StudyRun run, predict(base_run, change.at("set")));
      ASSIGN_OR_RETURN(const double y, study_metric(run, of));
      ASSIGN_OR_RETURN(const double ratio, ratio_of(y, base, of));
      out.bars.push_back(
          {.name = text_at(change, "name"), .parts = {100 * (ratio - 1)}});
    }
    return out;
  }

  const json& file_;
  StudyRuns runs_;
};

}  // namespace

Result<Study> evaluate_study(const std::string& text,
                             const std::string& where) {
  const json file = json::parse(text, nullptr, false);
  if (!file.is_object())
    return invalid_argument(where + ": is not a JSON object");
  try {
    auto study = Evaluation(file).run();
    if (!study.ok()) return study.status().with_context(where);
    return study;
  } catch (const json::exception& e) {
    return invalid_argument(fmt::format("{}: {}", where, e.what()));
  }
}

std::string study_text(const Study& s) {
  std::string out = fmt::format("{}\n{}\n", s.title, s.source);
  if (!s.note.empty()) out += s.note + "\n";
  std::vector<std::vector<std::string>> rows = {
      {"figure", "published", "ours", "unit", "error"}};
  for (const StudyFigure& f : s.figures)
    rows.push_back({f.text, fmt::format("{:g}", f.published),
                    fmt::format("{:.4g}", f.ours), f.unit,
                    fmt::format("{:+.1f} {}", f.error(),
                                f.is_difference ? "points" : "%")});
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
      series.push_back({{"name", line.name}, {"points", line.points}});
    for (const auto& bar : c.bars)
      series.push_back({{"name", bar.name}, {"parts", bar.parts}});
    charts.push_back({{"title", c.title}, {"series", std::move(series)}});
  }
  return json_output({{"title", s.title},
                      {"source", s.source},
                      {"figures", std::move(figures)},
                      {"claims", std::move(claims)},
                      {"charts", std::move(charts)}});
}

}  // namespace remesh::ctl
