#include "parallel/planner/choose.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "parallel/geometry/param_table.h"
#include "parallel/planner/local.h"
#include "parallel/planner/memory.h"
#include "proto/base/text.h"

namespace remesh::planner {

int64_t offered_slots(const PlacementRequest& q) {
  int64_t offered = 0;
  for (const WorkerSlots& w : q.workers) offered += w.slots;
  return offered;
}

PlacementRequest only_on(PlacementRequest q,
                         const std::set<std::string>& hosts) {
  std::erase_if(q.workers,
                [&](const WorkerSlots& w) { return !hosts.contains(w.host); });
  return q;
}

namespace {

using geometry::Layout;

std::string offers(const PlacementRequest& q) {
  if (q.workers.empty()) return "no workers";
  std::vector<std::string> parts;
  for (const WorkerSlots& w : q.workers)
    parts.push_back(fmt::format("{}: {}", w.worker, w.slots));
  std::ranges::sort(parts);
  constexpr size_t kShown = 8;
  if (parts.size() > kShown) {
    const size_t more = parts.size() - kShown;
    parts.resize(kShown);
    parts.push_back(fmt::format("and {} more workers", more));
  }
  return join(parts);
}

// The number of offered slots that may be used.
int64_t usable(const PlacementRequest& q, int64_t offered) {
  return q.max_slots == -1 ? offered : std::min<int64_t>(offered, q.max_slots);
}

// Ranks of one replica by the degrees that are given.
int64_t unit_of(const PlacementRequest& q) {
  const auto given = [](int degree) { return int64_t{std::max(degree, 1)}; };
  return given(q.degrees.tp) * given(q.degrees.pp) * given(q.degrees.cp);
}

// The slots of the smallest mesh by its degrees and elastic.min_slots, and why
// so many.
std::pair<int64_t, std::string> needed_slots(const PlacementRequest& q) {
  if (!q.layouts.empty()) {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const Layout& l : q.layouts)
      least = std::min<int64_t>(least, l.world());
    return {std::max<int64_t>(least, q.min_slots),
            q.layouts.size() == 1 ? q.layouts[0].to_string()
                                  : "the smallest of elastic.layouts"};
  }
  const int64_t unit = unit_of(q);
  const int64_t least = std::max(q.degrees.dp, 1) * unit;
  const int64_t needed =
      std::max<int64_t>(least, (q.min_slots + unit - 1) / unit * unit);
  return {needed, needed == least && q.degrees.dp != -1
                      ? "the degrees in [parallel]"
                  : needed == least && unit > 1 ? "tp x pp x cp"
                                                : "elastic.min_slots"};
}

Status too_few(const PlacementRequest& q, int64_t offered) {
  const auto [needed, why] = needed_slots(q);
  return exhausted(fmt::format("too few slots: {} offered ({}), needs {} ({})",
                               offered, offers(q), needed, why));
}

// Whether a mesh that the job admits has the memory it needs.
Status fits(const PlacementRequest& q, const Layout& l) {
  if (!q.shape) return ok_status();
  const auto have = static_cast<uint64_t>(rank_memory(q, l));
  if (have == 0) return ok_status();
  const uint64_t need = predict_worst_memory(*q.shape, l).total();
  if (need <= have) return ok_status();
  constexpr double kMiB = 1024 * 1024;
  return exhausted(fmt::format(
      "{}: a rank needs {:.0f} MiB and its share of the host's memory is "
      "{:.0f} MiB; use more slots, train.recompute, parallel.zero_stage or a "
      "smaller train.local_batch_size",
      l.to_string(), static_cast<double>(need) / kMiB,
      static_cast<double>(have) / kMiB));
}

Result<LayoutChoice> choose_preferred(const PlacementRequest& q,
                                      int64_t offered, bool* short_of_memory) {
  const int64_t slots = usable(q, offered);
  Status refused = ok_status();
  for (const Layout& l : q.layouts) {
    if (l.world() > slots || l.world() < q.min_slots) continue;
    Status s = q.shape ? admit(*q.shape, l) : ok_status();
    if (s.ok()) {
      s = fits(q, l);
      *short_of_memory = *short_of_memory || !s.ok();
    }
    if (s.ok()) return LayoutChoice{l, "the mesh asked for", "", {}};
    if (refused.ok()) refused = s;
  }
  if (!refused.ok()) return refused;
  return too_few(q, offered);
}

// The degrees from which the model axes' are chosen.
struct Axes {
  std::vector<int> tp, pp, cp;
};

// The degrees that are given, or those up to `most`. admitted: only those that
// the job admits, which for an axis does not depend on the others.
Axes axes_of(const PlacementRequest& q, int64_t most, bool admitted) {
  constexpr int64_t kMostDegree = 1024;
  const auto degrees = [&](int given, int Layout::*axis) {
    if (given != -1 || !q.shape) return std::vector<int>{std::max(given, 1)};
    std::vector<int> out;
    for (int d = 1; d <= std::min(most, kMostDegree); ++d) {
      Layout l;
      l.*axis = d;
      if (!admitted || admit(*q.shape, l).ok()) out.push_back(d);
    }
    return out;
  };
  return {.tp = degrees(q.degrees.tp, &geometry::Layout::tp),
          .pp = degrees(q.degrees.pp, &geometry::Layout::pp),
          .cp = degrees(q.degrees.cp, &geometry::Layout::cp)};
}

// The largest mesh of at most `slots` ranks by the degrees alone; 0 if there is
// none.
int64_t largest_world(const PlacementRequest& q, const Axes& axes,
                      int64_t slots) {
  int64_t largest = 0;
  for (const int64_t tp : axes.tp)
    for (const int64_t pp : axes.pp)
      for (const int64_t cp : axes.cp) {
        const int64_t unit = tp * pp * cp;
        const int64_t most = std::min(slots / unit, q.microbatches);
        const int64_t dp = q.degrees.dp == -1 ? most : q.degrees.dp;
        if (dp <= most) largest = std::max(largest, dp * unit);
      }
  return largest;
}

// Calls f for every mesh of `world` ranks with degrees of these axes.
template <typename F>
void for_each_layout(const PlacementRequest& q, int64_t world, const Axes& axes,
                     const F& f) {
  for (const int tp : axes.tp) {
    if (world % tp != 0) continue;
    for (const int pp : axes.pp) {
      if (world / tp % pp != 0) continue;
      for (const int cp : axes.cp) {
        const int64_t dp = world / tp / pp / cp;
        if (world / tp / pp % cp != 0 || dp > q.microbatches ||
            (q.degrees.dp != -1 && dp != q.degrees.dp))
          continue;
        f(Layout{.dp = static_cast<int>(dp), .pp = pp, .tp = tp, .cp = cp});
      }
    }
  }
}

// Which meshes need more memory than there is, which may be thousands.
class MemoryLimit {
 public:
  // They must outlive it.
  MemoryLimit(const PlacementRequest& q, const RankShares& shares,
              MemoryPredictor* predictor)
      : q_(q),
        shares_(shares),
        predictor_(predictor),
        parameters_(
            q.shape ? geometry::ParamTable::make(q.shape->model).num_elements()
                    : 0) {}

  // Without a prediction: by the share of the model's state, or because a mesh
  // with the same model axes did not fit that shards the state at least as much
  // and has at most as many microbatches. Padding may make that one need a
  // little more; once many did not fit, that does not matter.
  bool excludes(const Layout& l, double bytes) {
    if (bytes == 0) return false;
    const double slack = predicted_ < kMostPrecise ? 0.95 : 1;
    const Need own = need_of(l);
    const auto& others = unfit_[axes(l)];
    const bool excluded =
        static_cast<double>(least_memory(*q_.shape, l, parameters_)) > bytes ||
        std::ranges::any_of(others, [&](const Need& n) {
          return n.shard_group >= own.shard_group &&
                 n.microbatches <= own.microbatches && n.bytes * slack > bytes;
        });
    if (excluded && !nearest_) nearest_ = l;
    return excluded;
  }

  bool fits(const Layout& l) {
    const auto [known, is_new] = bytes_.try_emplace({l.world(), l.tp});
    if (is_new) known->second = shares_.memory(l);
    const double bytes = known->second;
    if (bytes == 0) return true;
    ++predicted_;
    Need n = need_of(l);
    n.bytes = static_cast<double>(predictor_->worst(l).total());
    if (n.bytes <= bytes) return true;
    unfit_[axes(l)].push_back(n);
    if (n.bytes / bytes < excess_) {
      excess_ = n.bytes / bytes;
      nearest_ = l;
    }
    return false;
  }

  // A mesh was predicted not to fit.
  bool is_short() const { return excess_ < kNone; }
  // Of those that do not fit the one that comes nearest; nothing if all do.
  const std::optional<Layout>& nearest() const { return nearest_; }

 private:
  static constexpr int kMostPrecise = 64;
  static constexpr double kNone = std::numeric_limits<double>::infinity();
  struct Need {
    int shard_group = 1;
    int64_t microbatches = 1;
    double bytes = 0;
  };
  static std::tuple<int, int, int> axes(const Layout& l) {
    return {l.tp, l.pp, l.cp};
  }
  Need need_of(const Layout& l) const {
    return {shard_group_on(*q_.shape, l), most_microbatches(*q_.shape, l), 0};
  }

  const PlacementRequest& q_;
  const RankShares& shares_;
  MemoryPredictor* const predictor_;
  const int64_t parameters_;
  std::map<std::pair<int, int>, double> bytes_;  // RankShares::memory()
  int predicted_ = 0;
  std::map<std::tuple<int, int, int>, std::vector<Need>> unfit_;
  std::optional<Layout> nearest_;
  double excess_ = kNone;  // of nearest_: bytes needed over those there are
};

struct Candidate {
  double bound_s = 0;  // step_lower_bound_s()
  Layout layout;
  const Parts* parts = nullptr;
};

// The best mesh of exactly `world` ranks. Of equal times the first, which has
// the lower tp, pp, cp, in this order. Meshes are simulated in the order of
// their bounds, until no bound is below the best time. unfit: the first reason
// why the job rules out a mesh.
std::optional<Layout> best_of(const PlacementRequest& q,
                              const RankShares& shares, int64_t world,
                              const Axes& axes, MemoryLimit& memory,
                              Status* unfit) {
  const Machine machine = shares.machine(world);
  const ModelError known = q.shape ? model_error(q) : ModelError{};
  const double error = known.factor * known.uncertainty;
  const Execution run = q.shape ? engine_execution(*q.shape) : Execution{};
  std::map<std::pair<int, int>, Parts> parts;  // by tp and cp
  std::vector<Candidate> candidates;
  for_each_layout(q, world, axes, [&](const Layout& l) {
    if (q.shape) {
      const Status s = admit(*q.shape, l);
      if (unfit->ok()) *unfit = s;
      if (!s.ok() || memory.excludes(l, machine.memory_bytes)) return;
    }
    candidates.push_back({.layout = l});
    if (!q.shape) return;
    const auto [it, is_new] = parts.try_emplace({l.tp, l.cp});
    if (is_new) it->second = parts_of(machine, *q.shape, l, run);
    candidates.back().parts = &it->second;
    if (const auto measured = measured_step_s(q, l))
      candidates.back().bound_s = *measured;
    else if (!q.by_speed)  // which a bound does not know
      candidates.back().bound_s =
          error * step_lower_bound_s(machine, *q.shape, l, run, it->second);
  });
  if (!q.shape && !candidates.empty()) return candidates.front().layout;
  std::ranges::stable_sort(candidates,
                           [](const Candidate& a, const Candidate& b) {
                             return a.bound_s < b.bound_s;
                           });
  const auto order = [](const Layout& l) {
    return std::make_tuple(l.tp, l.pp, l.cp);
  };
  std::optional<Layout> best;
  double best_s = std::numeric_limits<double>::infinity();
  for (const auto& [bound_s, l, its_parts] : candidates) {
    if (bound_s > best_s) break;
    // Where one that might have fitted does not, most of them do not.
    const bool memory_first = memory.is_short();
    if (memory_first && !memory.fits(l)) continue;
    double seconds = bound_s;
    if (!measured_step_s(q, l))
      seconds = error * (q.by_speed ? predict_step(q, l)
                                    : predict_step(machine, *q.shape, l, run,
                                                   *its_parts))
                            .total_s;
    if (seconds > best_s || (seconds == best_s && order(l) > order(*best)))
      continue;
    if (!memory_first && !memory.fits(l)) continue;
    best = l;
    best_s = seconds;
  }
  return best;
}

std::string prediction(const PlacementRequest& q, const Layout& l) {
  if (!chooses_model_axes(q)) return "";
  const StepCost c = predict_step(q, l);
  const auto measured = measured_step_s(q, l);
  const double error = model_error(q).factor;
  std::string out =
      measured ? fmt::format("{:.2g} s a step measured before", *measured)
               : fmt::format("predicted {:.2g} s a step", error * c.total_s);
  if (!measured && !q.measured.empty())
    out += fmt::format(
        " ({:.2g} times the cost model's, as on {})", error,
        plural(static_cast<int64_t>(q.measured.size()), "mesh", "es"));
  return out +
         fmt::format(", {:.0f} % of it exposed communication, {:.0f} % bubble",
                     100 * c.terms.exposed() / c.total_s,
                     100 * c.terms.bubble / c.total_s);
}

// A pinned mesh may have been measured that the job itself does not allow.
bool has_given_degrees(const PlacementRequest& q, const Layout& l) {
  const auto is = [](int given, int degree) {
    return given == -1 || given == degree;
  };
  const Degrees& d = q.degrees;
  return is(d.dp, l.dp) && is(d.tp, l.tp) && is(d.pp, l.pp) && is(d.cp, l.cp);
}

// A smaller mesh that was clearly faster than a mesh of the size of `large` is
// expected to be, given that one was tried.
const MeasuredStep* faster_and_smaller(const PlacementRequest& q,
                                       const Layout& large, int64_t needed) {
  constexpr double kClearly = 1.1;
  const auto is_as_large = [&](const MeasuredStep& m) {
    return m.layout.world() == large.world();
  };
  if (!chooses_model_axes(q) || std::ranges::none_of(q.measured, is_as_large))
    return nullptr;
  double most_s = expected_step_s(q, large) / kClearly;
  const MeasuredStep* best = nullptr;
  for (const MeasuredStep& m : q.measured) {
    if (m.layout.world() >= large.world() || m.layout.world() < needed ||
        m.seconds >= most_s || !has_given_degrees(q, m.layout) ||
        !admit(*q.shape, m.layout).ok())
      continue;
    const PlacementRequest there = only_on(q, m.hosts);
    if (offered_slots(there) < m.layout.world() || !fits(there, m.layout).ok())
      continue;
    best = &m;
    most_s = m.seconds;
  }
  return best;
}

std::string limit_of(const PlacementRequest& q, int64_t offered,
                     const Layout& l, int64_t unit) {
  const bool model_axes = chooses_model_axes(q);
  if (q.degrees.dp != -1 && !model_axes)
    return fmt::format("parallel.data_parallel_degree = {}", q.degrees.dp);
  if (l.dp == q.microbatches && !model_axes)
    return plural(q.microbatches, "microbatch", "es");
  const int64_t slots = usable(q, offered);
  if (slots < offered && l.world() + unit > slots)
    return fmt::format(
        "{} {}",
        q.scaled ? "remesh scale" : "elastic.max_slots =", q.max_slots);
  if (!model_axes && unit > 1 && l.world() + unit > slots)
    return fmt::format("multiples of {} slots", unit);
  return "no larger mesh that the model, its microbatches and memory admit";
}

Status check_degrees(const PlacementRequest& q, int64_t unit) {
  const std::string one_each =
      fmt::format("the global batch has {} and a data-parallel rank needs one",
                  plural(q.microbatches, "microbatch", "es"));
  if (q.degrees.dp > q.microbatches)
    return invalid_argument(
        fmt::format("parallel.data_parallel_degree = {}: {}; set 1 to {}, or "
                    "-1 to have it chosen",
                    q.degrees.dp, one_each, q.microbatches));
  const bool grows = chooses_model_axes(q);
  const int64_t largest =
      (q.degrees.dp == -1 ? q.microbatches : q.degrees.dp) * unit;
  const int64_t least = (q.degrees.dp == -1 ? 1 : q.degrees.dp) * unit;
  if (!grows && largest < q.min_slots)
    return invalid_argument(fmt::format(
        "elastic.min_slots = {}: the mesh has at most {} ({})", q.min_slots,
        plural(largest, "rank"),
        q.degrees.dp == -1 ? one_each
                           : std::string("by the degrees in [parallel]")));
  if (q.max_slots != -1 && least > q.max_slots)
    return invalid_argument(
        fmt::format("elastic.max_slots = {}: the degrees in [parallel] need {}",
                    q.max_slots, plural(least, "slot")));
  const int64_t needed = (q.min_slots + unit - 1) / unit * unit;
  if (q.max_slots != -1 && needed > q.max_slots)
    return invalid_argument(
        fmt::format("elastic.max_slots = {}: at least {} slots are needed for "
                    "elastic.min_slots = {} in multiples of {}",
                    q.max_slots, needed, q.min_slots, unit));
  if (!q.shape) return ok_status();
  const auto given = [](int degree) { return std::max(degree, 1); };
  return admit(*q.shape, {.dp = given(q.degrees.dp),
                          .pp = given(q.degrees.pp),
                          .tp = given(q.degrees.tp),
                          .cp = given(q.degrees.cp)});
}

Result<LayoutChoice> choose_by_degrees(const PlacementRequest& q,
                                       int64_t offered,
                                       MemoryPredictor* predictor,
                                       bool* short_of_memory) {
  const int64_t unit = unit_of(q);
  RETURN_IF_ERROR(check_degrees(q, unit));
  const int64_t needed = needed_slots(q).first;
  const int64_t slots = usable(q, offered);
  const Axes admitted = axes_of(q, slots, /*admitted=*/true);
  const RankShares shares(q);
  MemoryLimit memory(q, shares, predictor);
  Status unfit = ok_status();
  // Far below the largest mesh it pays to skip some sizes: only the memory of a
  // few hosts can be the reason, and every size takes a while.
  constexpr int64_t kEverySize = 4096;
  const int64_t most = largest_world(q, admitted, slots);
  for (int64_t world = most / unit * unit; world >= needed;
       world -=
       most - world < kEverySize ? unit : (world / 16 / unit + 1) * unit)
    if (const auto best = best_of(q, shares, world, admitted, memory, &unfit)) {
      *short_of_memory = memory.nearest().has_value();
      if (const MeasuredStep* m = faster_and_smaller(q, *best, needed))
        return LayoutChoice{
            m->layout,
            fmt::format("{} is slower: {:.2g} s a step", best->to_string(),
                        expected_step_s(q, *best)),
            prediction(only_on(q, m->hosts), m->layout), m->hosts};
      return LayoutChoice{
          *best, limit_of(q, offered, *best, unit), prediction(q, *best), {}};
    }
  *short_of_memory = memory.nearest().has_value();
  if (memory.nearest()) return fits(q, *memory.nearest());
  if (unfit.ok() && slots >= needed)  // say what the job does not admit
    (void)best_of(q, shares, slots / unit * unit,
                  axes_of(q, slots, /*admitted=*/false), memory, &unfit);
  if (slots >= needed)
    return exhausted(fmt::format(
        "{} offered ({}), and no mesh of {} to {} runs the job: {}",
        plural(offered, "slot"), offers(q), needed, slots, unfit.message()));
  return too_few(q, offered);
}

}  // namespace

bool chooses_model_axes(const PlacementRequest& q) {
  return q.shape &&
         (q.degrees.tp == -1 || q.degrees.pp == -1 || q.degrees.cp == -1);
}

int64_t missing_slots(const PlacementRequest& q) {
  return std::max<int64_t>(0,
                           needed_slots(q).first - usable(q, offered_slots(q)));
}

Result<LayoutChoice> choose_layout(const PlacementRequest& q,
                                   MemoryPredictor* predictor,
                                   bool* short_of_memory) {
  const int64_t offered = offered_slots(q);
  *short_of_memory = false;
  return q.layouts.empty()
             ? choose_by_degrees(q, offered, predictor, short_of_memory)
             : choose_preferred(q, offered, short_of_memory);
}

}  // namespace remesh::planner
