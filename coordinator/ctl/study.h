// Published studies of training at scale, reproduced by the planner
// (deploy/studies/NAME.json). A file has
//
//   title, source, note
//   runs      by name, the settings of a training run (the list is in
//             study_run.cc); "base" names a run whose settings it takes over
//   figures   {text, run, metric, published, unit}; with "over", another run,
//             the value is by how many percent the metric is larger
//   claims    {text, run, metric, unit, least and/or most}, with "over", in
//             percent, likewise; or "beyond": {run, over}, an effect that is
//             smaller than this one
//   charts    {title, x, y, series: [{name, run, vary, values, set}]}: a metric
//             against a setting that varies; "published" are points to compare;
//             "relative": in percent of the first point. Or {title, bars,
//             runs}: "memory" by category, or "effect" of changes on a metric.
//             Runs that need more memory than a device has are marked
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "proto/base/status.h"

namespace remesh::ctl {

struct StudyFigure {
  std::string text, unit;
  double published = 0, ours = 0;
  bool is_difference = false;  // a percentage: errors are in points
  double error() const {
    return is_difference ? ours - published : 100 * (ours / published - 1);
  }
  // In tables: text, published, ours, unit, error.
  std::vector<std::string> row() const;
};

struct StudyClaim {
  std::string text;
  std::string ours;  // the value, and what the claim asks of it
  bool holds = false;
};

struct StudyChart {
  struct Series {
    std::string name;
    bool published = false;
    std::vector<std::pair<double, double>> points;
    std::vector<double> too_large;  // x of points that no device has room for
  };
  struct Bar {
    std::string name;
    std::vector<double> parts;  // as many as `parts` below
    bool too_large = false;
  };
  std::string title, x, y;
  bool linear = false;  // the x axis; otherwise logarithmic if x > 0
  std::vector<Series> series;
  std::vector<std::string> parts;
  std::vector<Bar> bars;
};

struct Study {
  std::string title, source, note;
  std::vector<StudyFigure> figures;
  std::vector<StudyClaim> claims;
  std::vector<StudyChart> charts;
};

// Predicts every run that the text (JSON) names. `where` names it in errors.
Result<Study> evaluate_study(const std::string& text, const std::string& where);

// The tables as text, and everything as JSON or as one HTML page that needs no
// other file.
std::string study_text(const Study& study);
std::string study_json(const Study& study);
std::string study_page(const Study& study);  // study_page.cc

}  // namespace remesh::ctl
