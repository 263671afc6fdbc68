#include "coordinator/ctl/study.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "parallel/jobfile/jobfile.h"
#include "tests/testing/expect.h"
#include "tests/testing/temp_dir.h"

namespace remesh::ctl {
namespace {

using Json = nlohmann::json;

Json small() {
  return Json::parse(R"({
    "title": "A <study>", "source": "nobody",
    "runs": {
      "base": {"cluster": "h100", "model": "llama3-8b", "seq": 8192,
               "devices": 8, "zero": 3, "batch_per_device": 2},
      "many": {"base": "base", "devices": 64},
      "few": {"base": "many", "devices": 8}},
    "figures": [
      {"text": "speed", "run": "base", "metric": "tokens_per_s",
       "published": 100, "unit": "tokens/s"},
      {"text": "loss", "run": "many", "over": "base", "published": -1,
       "metric": "tokens_per_s", "unit": "%"}],
    "claims": [
      {"text": "positive", "run": "base", "metric": "mfu", "least": 1},
      {"text": "huge", "run": "base", "metric": "mfu", "unit": "%",
       "least": 99},
      {"text": "same", "run": "few", "over": "base", "metric": "mfu",
       "least": -1e-9, "most": 1e-9},
      {"text": "scaling has an effect", "run": "many", "over": "base",
       "metric": "mfu", "beyond": {"run": "few", "over": "base"}}],
    "charts": [
      {"title": "Scaling", "x": "devices", "y": "%", "relative": true,
       "metric": "tokens_per_s", "series": [
         {"name": "ours", "run": "base", "vary": "devices",
          "values": [8, 16, 32]},
         {"name": "theirs", "published": [[8, 100], [32, 90]]}]},
      {"title": "Memory", "y": "GB", "bars": "memory", "runs": ["base"]},
      {"title": "Effects", "y": "%", "bars": "effect", "run": "base",
       "metric": "tokens_per_s",
       "changes": [{"name": "full", "set": {"recompute": "full"}}]}]})");
}

std::string problem(const Json& json) {
  return evaluate_study(json.dump(), "s").status().message();
}

TEST(Study, FiguresClaimsAndChartsAreEvaluated) {
  ASSERT_OK_AND(const auto made, evaluate_study(small().dump(), "s"));
  const Study& s = made;
  ASSERT_EQ(s.figures.size(), 2U);
  EXPECT_GT(s.figures[0].ours, 1000);
  EXPECT_NEAR(s.figures[0].error(), s.figures[0].ours - 100, 1e-6);
  EXPECT_LT(s.figures[1].ours, 0);
  EXPECT_NEAR(s.figures[1].error(), s.figures[1].ours + 1, 1e-9);
  std::vector<bool> holds;
  for (const StudyClaim& c : s.claims) holds.push_back(c.holds);
  EXPECT_EQ(holds, (std::vector<bool>{true, false, true, true}));
  EXPECT_TRUE(s.claims[1].ours.ends_with(" %, at least 99 %"));
  ASSERT_EQ(s.charts.size(), 3U);
  EXPECT_NEAR(s.charts[0].series[0].points[0].second, 100, 1e-9);
  EXPECT_LT(s.charts[0].series[0].points[2].second, 100);
  EXPECT_EQ(s.charts[1].bars[0].parts.size(), s.charts[1].parts.size());
  EXPECT_LT(s.charts[2].bars[0].parts[0], 0);
}

// 16 bytes for each of 8e9 elements, on one device of 80 GB.
TEST(Study, ALayoutBeyondTheMemoryIsMarked) {
  Json j = small();
  const std::string none = study_page(evaluate_study(j.dump(), "s").value());
  EXPECT_LACKS(none, "more memory than a device has");
  j["charts"][0]["series"][0]["values"] = {1, 8};
  j["runs"]["base"]["devices"] = 1;
  ASSERT_OK_AND(const auto s, evaluate_study(j.dump(), "s"));
  const Json out = Json::parse(study_json(s))["charts"];
  EXPECT_EQ(out[0]["series"][0]["too_large"], Json::array({1.0}));
  EXPECT_EQ(out[0]["series"][1]["too_large"], Json::array());
  EXPECT_EQ(out[1]["series"][0]["too_large"], true);
  EXPECT_HAS(study_page(s),
             ", predicted to need more memory than a device has</title>");
  EXPECT_HAS(study_page(s), "base \u2020</text>");
}

TEST(Study, ErrorsNameTheRunAndWhatIsAllowed) {
  Json j = small();
  j["runs"]["base"]["tp"] = 3;
  EXPECT_HAS(problem(j), "a multiple of tp x pp x cp = 3");
  j = small();
  j["runs"]["base"]["devcies"] = 3;
  EXPECT_HAS(problem(j), "unknown key 'devcies'");
  j = small();
  j["figures"][0]["metric"] = "speed";
  EXPECT_HAS(problem(j), "unknown metric 'speed'; known: bubble");
  j = small();
  j["figures"][0]["run"] = "none";
  EXPECT_HAS(problem(j), "no run is called none");
  j = small();
  j["runs"]["base"]["base"] = "many";
  EXPECT_HAS(problem(j), "cycle");
  for (int i = 0; i < 20; ++i)
    j["runs"][std::to_string(i)]["base"] =
        i == 0 ? "few" : std::to_string(i - 1);
  j["runs"]["base"].erase("base");
  j["figures"][0]["run"] = "19";
  EXPECT_EQ(problem(j), "");
  j = small();
  j.erase("title");
  EXPECT_HAS(problem(j), "title");
  EXPECT_SAYS(evaluate_study("[", "s"), "JSON object");
}

TEST(Study, WhatHasNoMeaningIsRefused) {
  const auto changed = [](const char* pointer, const Json& value) {
    Json j = small();
    j[Json::json_pointer(pointer)] = value;
    return problem(j);
  };
  EXPECT_EQ(changed("/figures/0/published", 0),
            "s: figure 'speed': published = 0: must not be 0 without \"over\"");
  EXPECT_EQ(changed("/figures/1/published", 0), "");
  EXPECT_EQ(changed("/figures/1/metric", "bubble"),
            "s: bubble is 0, and nothing is a percentage of it");
  EXPECT_EQ(changed("/charts/0/metric", "bubble"),
            "s: bubble is 0, and nothing is a percentage of it");
  EXPECT_EQ(changed("/charts/2/metric", "bubble"),
            "s: bubble is 0, and nothing is a percentage of it");
  for (const char* degree : {"tp", "pp", "cp"})
    EXPECT_EQ(changed(("/runs/base/" + std::string(degree)).c_str(), 1 << 21),
              "s: run base: " + std::string(degree) +
                  " = 2097152: must be an integer from 0 to 1048576");
  EXPECT_EQ(changed("/runs/base/zero", 7),
            "s: run base: zero = 7: must be from 0 to 3");
  Json j = small();
  j["runs"]["base"]["cluster"] = "a100-80";
  j["runs"]["base"]["precision"] = "fp8";
  EXPECT_EQ(problem(j),
            "s: run base: precision = \"fp8\": must be bf16 on a device that "
            "has no fp8");
  EXPECT_EQ(changed("/figures", Json::object()),
            "s: figures = {}: must be an array");
  EXPECT_EQ(changed("/runs", Json::array()), "s: runs = []: must be an object");
  j = small();
  for (const char* key : {"figures", "claims", "charts"}) j.erase(key);
  EXPECT_EQ(problem(j), "s: must have figures, claims or charts");
}

TEST(Study, AClaimOfWhichNothingIsComputedIsRefused) {
  Json j = small();
  j["claims"][0].erase("least");
  EXPECT_EQ(problem(j), "s: claim 'positive': must have least, most or beyond");
  j = small();
  j["claims"][3].erase("over");
  EXPECT_EQ(problem(j), "s: 'scaling has an effect': over is missing");

  const TempDir dir;
  std::string text = jobfile::read_text("deploy/clusters/h100.toml").value();
  const size_t at = text.find("busy_w");
  text.erase(at, text.find('\n', at) - at);
  j = small();
  j["runs"]["base"]["cluster"] = dir.write("no-power.toml", text);
  EXPECT_EQ(problem(j), "");
  for (const char* metric : {"watts", "joules_per_token"}) {
    j["claims"][0]["metric"] = metric;
    EXPECT_EQ(problem(j),
              "s: " + std::string(metric) +
                  ": the cluster's description has no device.busy_w");
  }
}

TEST(Study, AValueOfTheWrongTypeIsNamed) {
  const struct {
    const char *at, *error;
  } kCases[] = {
      {"/note", "note = {}: must be a string"},
      {"/figures/0/published", "'speed': published = {}: must be a number"},
      {"/figures/0/run", "'speed': run = {}: must be a string"},
      {"/claims/0/least", "'positive': least = {}: must be a number"},
      {"/claims/3/beyond/over", "over = {}: must be a string"},
      {"/charts/0/relative", "'Scaling': relative = {}: must be true or false"},
      {"/charts/0/series", "'Scaling': series = {}: must be an array"},
      {"/charts/0/series/0/values/1",
       "'ours': values = [8,{},32]: must be numbers"},
      {"/charts/0/series/1/published/0/1",
       "'theirs': published = [[8,{}],[32,90]]: must be pairs of numbers"},
      {"/charts/1/runs/0", "'Memory': runs = [{}]: must be names of runs"}};
  for (const auto& c : kCases) {
    Json j = small();
    j[Json::json_pointer(c.at)] = Json::object();
    EXPECT_EQ(problem(j), std::string("s: ") + c.error);
  }
  for (const char* object :
       {"/runs/base", "/figures/0", "/charts/1", "/charts/2/changes/0/set"}) {
    Json j = small();
    j[Json::json_pointer(object)] = 7;
    EXPECT_HAS(problem(j), "must be an object");
  }
}

// Counts of opening and closing tags; everything in one file.
TEST(Study, ThePageIsCompleteAndNeedsNoOtherFile) {
  const std::string page =
      study_page(evaluate_study(small().dump(), "s").value());
  const auto count = [&](const std::string& what) {
    size_t n = 0;
    for (size_t at = page.find(what); at != std::string::npos;
         at = page.find(what, at + 1))
      ++n;
    return n;
  };
  for (const std::string tag : {"svg", "table", "figure", "text", "tr"})
    EXPECT_EQ(count("<" + tag + ">") + count("<" + tag + " "),
              count("</" + tag + ">"))
        << tag;
  EXPECT_EQ(count("<svg"), 3U);
  EXPECT_EQ(count("A &lt;study&gt;"), 2U);
  for (const char* other :
       {"<script", "src=", "href=", "@import", "nan", "inf"})
    EXPECT_EQ(count(other), 0U) << other;
}

// Measured seconds would touch each other, and leave the page at its edge.
TEST(Study, AnAxisOfFractionsHasRoundNumbers) {
  const auto axis = [](std::vector<std::pair<double, double>> points) {
    Study s;
    s.charts = {{.title = "t",
                 .x = "x",
                 .linear = true,
                 .series = {{.name = "s", .points = std::move(points)}}}};
    return study_page(s);
  };
  const std::string fractions = axis({{0.005537, 1}, {0.00609, 2}});
  EXPECT_HAS(fractions, ">0.0056</text>");
  EXPECT_LACKS(fractions, ">0.005537</text>");
  const std::string trials = axis({{1, 10}, {2, 10}, {3, 20}});
  EXPECT_HAS(trials, ">2</text>");
  EXPECT_LACKS(trials, ">1.5</text>");
}

// Regression limits: what the planner reaches on the published figures.
TEST(Study, TheShippedStudiesAreReproduced) {
  const struct {
    const char* name;
    double most_error;  // mean of the figures that are no differences, %
    size_t least_claims;
  } kStudies[] = {
      {"frontier", 9, 6}, {"torchtitan", 10, 4}, {"scaling", 8, 11}};
  for (const auto& k : kStudies) {
    const std::string path = std::string("deploy/studies/") + k.name + ".json";
    ASSERT_OK_AND(const auto s,
                  evaluate_study(jobfile::read_text(path).value(), path));
    double error = 0, n = 0;
    for (const StudyFigure& f : s.figures)
      if (!f.is_difference) {
        error += std::fabs(f.error());
        ++n;
      }
    EXPECT_LE(error / n, k.most_error) << k.name;
    size_t held = 0;
    for (const StudyClaim& c : s.claims) held += c.holds ? 1 : 0;
    EXPECT_GE(held, k.least_claims) << k.name << "\n" << study_text(s);
  }
}

}  // namespace
}  // namespace remesh::ctl
