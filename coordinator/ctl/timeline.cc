#include "coordinator/ctl/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "parallel/geometry/layout.h"

namespace remesh::ctl {
namespace {

using Json = nlohmann::ordered_json;

bool is_integer(const Json& e, const char* key) {
  const auto it = e.find(key);
  return it != e.end() && it->is_number_integer();
}

bool is_string(const Json& e, const char* key) {
  const auto it = e.find(key);
  return it != e.end() && it->is_string();
}

int64_t number(const Json& args, const char* key) {
  return is_integer(args, key) ? args[key].get<int64_t>() : -1;
}

// The problem of an event, or "".
std::string event_problem(const Json& e) {
  if (!e.is_object() || !is_string(e, "ph") || !is_integer(e, "pid") ||
      !is_integer(e, "tid") || !is_string(e, "name"))
    return "lacks ph, pid, tid or name";
  if (e["ph"] == "M") return "";
  if (e["ph"] != "X") return "is of a kind that is not written by ranks";
  if (!is_integer(e, "ts") || !is_integer(e, "dur") || !is_string(e, "cat"))
    return "lacks ts, dur or cat";
  if (e["dur"].get<int64_t>() < 0) return "has a negative length";
  if (e.contains("args") && !e["args"].is_object()) return "has bad args";
  return "";
}

// Spans of one lane must be nested or disjoint.
std::string nesting_problem(std::vector<TraceSpan> spans) {
  std::ranges::stable_sort(spans, {}, [](const TraceSpan& s) {
    return std::tuple(s.tid, s.begin_us, -s.end_us);
  });
  std::vector<const TraceSpan*> open;
  for (const TraceSpan& s : spans) {
    while (!open.empty() &&
           (open.back()->tid != s.tid || open.back()->end_us <= s.begin_us))
      open.pop_back();
    if (!open.empty() && s.end_us > open.back()->end_us)
      return fmt::format("'{}' begins in '{}' of lane {} and ends after it",
                         s.name, open.back()->name, s.tid);
    open.push_back(&s);
  }
  return "";
}

bool is_pass(const TraceSpan& s) {
  return s.tid == 0 && s.microbatch >= 0 &&
         (s.category == "forward" || s.category == "backward" ||
          s.category == "weight");
}

// Total length of the spans for which `counts`; nested ones count once.
template <typename F>
int64_t time_of(const std::vector<TraceSpan>& spans, int64_t from, int64_t to,
                const F& counts) {
  int64_t sum = 0, until = std::numeric_limits<int64_t>::min();
  for (const TraceSpan& s : spans) {
    if (s.tid != 0 || s.begin_us < from || s.end_us > to || !counts(s) ||
        s.end_us <= until)
      continue;
    sum += s.length_us();
    until = s.end_us;
  }
  return sum;
}

// The passes of one step on one rank.
struct Passes {
  int64_t begin = std::numeric_limits<int64_t>::max();
  int64_t end = std::numeric_limits<int64_t>::min();
  int64_t busy = 0;
  std::vector<double> lengths;  // seconds, in their order
};

struct Mean {
  double sum = 0;
  int64_t n = 0;
  void add(double x) {
    sum += x;
    ++n;
  }
  double value() const { return n == 0 ? 0 : sum / static_cast<double>(n); }
};

struct PassMeans {
  std::map<std::string, Mean> of;  // by category, seconds
  geometry::PassCosts costs() {
    // Where the backward is not split, its time is all in "backward".
    return {.forward = of["forward"].value(),
            .backward = of["backward"].value(),
            .weight = of["weight"].value()};
  }
};

std::map<int64_t, Passes> passes_of(const RankTrace& t, PassMeans* means) {
  std::map<int64_t, Passes> by_step;
  int64_t step = -1, from = 0, to = -1;
  for (const TraceSpan& s : t.spans) {
    if (s.tid == 0 && s.category == "step" && s.step >= 0) {
      step = s.step;
      from = s.begin_us;
      to = s.end_us;
    }
    if (!is_pass(s) || s.begin_us < from || s.end_us > to) continue;
    // Waiting for a neighbouring stage is not work.
    const int64_t busy =
        s.length_us() -
        time_of(t.spans, s.begin_us, s.end_us,
                [](const TraceSpan& x) { return x.category == "bubble"; });
    Passes& p = by_step[step];
    p.begin = std::min(p.begin, s.begin_us);
    p.end = std::max(p.end, s.end_us);
    p.busy += busy;
    p.lengths.push_back(static_cast<double>(busy) * 1e-6);
    means->of[s.category].add(static_cast<double>(busy) * 1e-6);
  }
  return by_step;
}

// By the pipeline's other coordinates and the step: the passes of each pipeline
// rank.
using Pipelines =
    std::map<std::tuple<int, int, int, int64_t>, std::map<int, Passes>>;

// Idle share of all ranks when each pass takes the time that was measured.
Result<double> replayed_share(const geometry::Schedule& schedule,
                              const Pipelines& pipelines) {
  double idle = 0, all = 0;
  for (const auto& [where, pipeline] : pipelines) {
    const auto& stages = pipeline;
    if (static_cast<int>(stages.size()) != schedule.pp) continue;
    ASSIGN_OR_RETURN(const geometry::PipeTiming replayed,
                     geometry::replay(schedule, [&](int rank, size_t n) {
                       const std::vector<double>& own = stages.at(rank).lengths;
                       // A rank with fewer microbatches skips the last ones.
                       return n < own.size() ? own[n] : 0;
                     }));
    const double total = replayed.makespan * schedule.pp;
    all += total;
    idle += total * replayed.bubble_share;
  }
  return all > 0 ? idle / all : 0;
}

std::string percent(double part, double of) {
  return of > 0 ? fmt::format("{:.1f} %", 100 * part / of) : "-";
}

}  // namespace

Result<RankTrace> parse_trace(std::string_view file, const std::string& name) {
  const Json j = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  const auto bad = [&](const std::string& why) {
    return corrupt(fmt::format("{}: not a rank's trace: {}", name, why));
  };
  if (!j.is_object() || !j.contains("traceEvents") ||
      !j["traceEvents"].is_array() || !j.contains("otherData"))
    return bad("no JSON with traceEvents and otherData");
  const Json& about = j["otherData"];
  RankTrace t;
  if (!about.is_object() || !is_integer(about, "rank") ||
      !is_integer(about, "generation") || !is_string(about, "mesh") ||
      !is_string(about, "schedule"))
    return bad("otherData lacks rank, generation, mesh or schedule");
  t.rank = about["rank"].get<int>();
  t.generation = about["generation"].get<int64_t>();
  t.mesh = about["mesh"].get<std::string>();
  t.schedule = about["schedule"].get<std::string>();
  t.chunks = static_cast<int>(std::max<int64_t>(1, number(about, "chunks")));
  t.microbatches = std::max<int64_t>(0, number(about, "microbatches"));
  t.dropped = std::max<int64_t>(0, number(about, "dropped"));
  for (size_t i = 0; i < j["traceEvents"].size(); ++i) {
    const Json& e = j["traceEvents"][i];
    if (const std::string why = event_problem(e); !why.empty())
      return bad(fmt::format("event {} {}", i, why));
    t.events.push_back(e.dump());
    if (e["ph"] == "M") continue;
    const Json args = e.contains("args") ? e["args"] : Json::object();
    const auto ts = e["ts"].get<int64_t>();
    t.spans.push_back({.tid = e["tid"].get<int>(),
                       .begin_us = ts,
                       .end_us = ts + e["dur"].get<int64_t>(),
                       .category = e["cat"].get<std::string>(),
                       .name = e["name"].get<std::string>(),
                       .step = number(args, "step"),
                       .microbatch = number(args, "microbatch")});
  }
  if (const std::string why = nesting_problem(t.spans); !why.empty())
    return bad(why);
  return t;
}

std::string merge_traces(const std::vector<RankTrace>& ranks) {
  int64_t first = std::numeric_limits<int64_t>::max();
  for (const RankTrace& t : ranks)
    for (const TraceSpan& s : t.spans) first = std::min(first, s.begin_us);
  if (first == std::numeric_limits<int64_t>::max()) first = 0;
  std::string out = fmt::format(
      R"({{"displayTimeUnit":"ms","otherData":{{"begin_unix_us":{}}},)"
      "\n\"traceEvents\":[",
      first);
  bool comma = false;
  for (const RankTrace& t : ranks) {
    const auto layout = geometry::Layout::parse(t.mesh);
    for (const std::string& text : t.events) {
      Json e = Json::parse(text);
      // A span shorter than a microsecond is invisible, and confuses viewers
      // that sort begins and ends.
      if (e["ph"] == "X" && e["dur"] == 0) continue;
      if (e["ph"] == "X") e["ts"] = e["ts"].get<int64_t>() - first;
      if (e["name"] == "process_name" && layout.ok() &&
          t.rank < layout->world()) {
        const geometry::Coord c = layout->coord(t.rank);
        std::string where = fmt::format("rank {}", t.rank);
        for (const auto& [axis, degree, at] :
             {std::tuple("pp", layout->pp, c.pp),
              std::tuple("dp", layout->dp, c.dp),
              std::tuple("cp", layout->cp, c.cp),
              std::tuple("tp", layout->tp, c.tp)})
          if (degree > 1) where += fmt::format(" {}{}", axis, at);
        e["args"]["name"] = where;
      }
      out += (comma ? ",\n" : "\n") + e.dump();
      comma = true;
    }
  }
  return out + "\n]}\n";
}

RankShares shares_of(const RankTrace& t) {
  RankShares r{.rank = t.rank};
  for (const TraceSpan& s : t.spans) {
    if (s.tid != 0 || s.category != "step") continue;
    r.step_s += static_cast<double>(s.length_us()) * 1e-6;
    const auto seconds = [&](auto counts) {
      return static_cast<double>(
                 time_of(t.spans, s.begin_us, s.end_us, counts)) *
             1e-6;
    };
    r.exposed_s += seconds([](const TraceSpan& x) {
      return x.category == "collective" || x.category == "wait";
    });
    r.bubble_s +=
        seconds([](const TraceSpan& x) { return x.category == "bubble"; });
  }
  return r;
}

Result<PipelineBubble> pipeline_bubble(const std::vector<RankTrace>& ranks) {
  PipelineBubble out;
  if (ranks.empty()) return out;
  const RankTrace& one = ranks.front();
  ASSIGN_OR_RETURN(const geometry::Layout layout,
                   geometry::Layout::parse(one.mesh));
  if (layout.pp == 1) return out;
  PassMeans means;
  std::vector<PassMeans> of_stage(static_cast<size_t>(layout.pp));
  Pipelines pipelines;
  for (const RankTrace& t : ranks) {
    if (t.mesh != one.mesh || t.schedule != one.schedule ||
        t.rank >= layout.world())
      return corrupt(fmt::format("rank {}: a trace of another mesh", t.rank));
    const geometry::Coord c = layout.coord(t.rank);
    PassMeans& stage = of_stage[static_cast<size_t>(c.pp)];
    for (const auto& [step, passes] : passes_of(t, &stage))
      pipelines[{c.dp, c.tp, c.cp, step}].emplace(c.pp, passes);
  }
  double idle = 0, all = 0;
  for (const auto& [where, stages] : pipelines) {
    if (static_cast<int>(stages.size()) != layout.pp) continue;
    Passes sum;
    for (const auto& [pp, p] : stages) {
      sum.begin = std::min(sum.begin, p.begin);
      sum.end = std::max(sum.end, p.end);
      sum.busy += p.busy;
    }
    const double total = static_cast<double>(sum.end - sum.begin) * layout.pp;
    all += total;
    idle += total - static_cast<double>(sum.busy);
    ++out.steps;
  }
  if (all == 0) return out;
  out.measured = idle / all;
  std::vector<geometry::PassCosts> costs;
  for (PassMeans& stage : of_stage) {
    costs.push_back(stage.costs());
    for (const auto& [category, mean] : stage.of) {
      means.of[category].sum += mean.sum;
      means.of[category].n += mean.n;
    }
  }
  out.costs = means.costs();
  ASSIGN_OR_RETURN(const auto kind, geometry::parse_schedule(one.schedule));
  ASSIGN_OR_RETURN(
      const geometry::Schedule schedule,
      geometry::make_schedule(kind, layout.pp,
                              static_cast<int>(one.microbatches), one.chunks));
  ASSIGN_OR_RETURN(const geometry::PipeTiming timing,
                   geometry::simulate(schedule, out.costs));
  out.scheduled = timing.bubble_share;
  ASSIGN_OR_RETURN(const geometry::PipeTiming uneven,
                   geometry::replay(schedule, [&](int rank, size_t n) {
                     const auto r = static_cast<size_t>(rank);
                     return geometry::pass_cost(schedule, costs[r],
                                                schedule.ranks[r][n].pass);
                   }));
  out.uneven = uneven.bubble_share;
  ASSIGN_OR_RETURN(out.replayed, replayed_share(schedule, pipelines));
  return out;
}

std::string trace_report(const std::vector<RankTrace>& ranks) {
  std::string out = fmt::format("{:>6}  {:>9}  {:>9}  {:>13}  {:>8}\n", "rank",
                                "traced", "compute", "exposed comm", "bubble");
  int64_t dropped = 0;
  for (const RankTrace& t : ranks) {
    const RankShares s = shares_of(t);
    out += fmt::format("{:>6}  {:>7.3f} s  {:>9}  {:>13}  {:>8}\n", s.rank,
                       s.step_s, percent(s.compute_s(), s.step_s),
                       percent(s.exposed_s, s.step_s),
                       percent(s.bubble_s, s.step_s));
    dropped += t.dropped;
  }
  const auto bubble = pipeline_bubble(ranks);
  if (!bubble.ok()) {
    out += "bubble: " + bubble.status().message() + "\n";
  } else if (bubble->steps > 0) {
    out += fmt::format(
        "pipeline idle from first to last pass: {:.1f} % measured, {:.1f} % by "
        "the schedule\nwith all passes alike, ratio {:.2f}\n"
        "(a replay of this trace, no prediction: {:.1f} % with each stage's "
        "mean times,\n{:.1f} % with the time of each pass)\n"
        "({}, {} microbatches; forward {:.2f} ms, backward {:.2f} ms{})\n",
        100 * bubble->measured, 100 * bubble->scheduled,
        bubble->measured / bubble->scheduled, 100 * bubble->uneven,
        100 * bubble->replayed, ranks[0].schedule, ranks[0].microbatches,
        1e3 * bubble->costs.forward, 1e3 * bubble->costs.backward,
        bubble->costs.weight > 0
            ? fmt::format(", weight {:.2f} ms", 1e3 * bubble->costs.weight)
            : "");
  }
  if (dropped > 0)
    out += fmt::format(
        "{} spans did not fit into the trace buffers; trace fewer steps "
        "(profile.num_steps)\n",
        dropped);
  return out;
}

}  // namespace remesh::ctl
