#include "parallel/geometry/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "proto/base/text.h"

namespace remesh::geometry {
namespace {

void gpipe(Schedule& s) {
  for (auto& ops : s.ranks) {
    for (int m = 0; m < s.num_microbatches; ++m)
      ops.push_back({Pass::kForward, m, 0});
    for (int m = 0; m < s.num_microbatches; ++m)
      ops.push_back({Pass::kBackward, m, 0});
  }
}

// Warm-up forwards, then forward and backward in turn, then the remaining
// backwards. With v chunks the k-th forward works on groups of pp microbatches,
// chunk by chunk; the k-th backward likewise with the chunks reversed.
void one_f_one_b(Schedule& s) {
  const int total = s.num_microbatches * s.chunks;
  const auto op = [&](Pass pass, int k) {
    const int group = s.chunks == 1 ? 1 : s.pp;
    const int within = k % (group * s.chunks);
    const int chunk = within / group;
    return PipeOp{pass, k / (group * s.chunks) * group + within % group,
                  pass == Pass::kForward ? chunk : s.chunks - 1 - chunk};
  };
  for (int r = 0; r < s.pp; ++r) {
    const int ahead = s.chunks == 1
                          ? s.pp - 1 - r
                          : 2 * (s.pp - 1 - r) + (s.chunks - 1) * s.pp;
    const int warmup = std::min(total, ahead);
    auto& ops = s.ranks[static_cast<size_t>(r)];
    for (int k = 0; k < warmup; ++k) ops.push_back(op(Pass::kForward, k));
    for (int k = warmup; k < total; ++k) {
      ops.push_back(op(Pass::kForward, k));
      ops.push_back(op(Pass::kBackward, k - warmup));
    }
    for (int k = total - warmup; k < total; ++k)
      ops.push_back(op(Pass::kBackward, k));
  }
}

// ZB-H1: the order of 1F1B, with the weight gradients of rank r delayed by r
// microbatches. So the last ranks send input gradients up at once, and the
// delayed gradients fill their bubble at the end; each rank holds at most pp
// microbatches, as the first rank of 1F1B does.
void zb_h1(Schedule& s) {
  one_f_one_b(s);
  for (int r = 0; r < s.pp; ++r) {
    std::vector<PipeOp> ops;
    int w = 0;
    for (const PipeOp& op : s.ranks[static_cast<size_t>(r)]) {
      ops.push_back(op);
      if (op.pass == Pass::kBackward && op.microbatch >= r)
        ops.push_back({Pass::kWeight, w++, 0});
    }
    while (w < s.num_microbatches) ops.push_back({Pass::kWeight, w++, 0});
    s.ranks[static_cast<size_t>(r)] = std::move(ops);
  }
}

double full_bubble(const PassCosts& c) {
  return c.forward + c.backward + c.weight;
}

// The delayed weight gradients fill the idle time at the end.
double zb_h1_bubble(const PassCosts& c) {
  return c.forward + c.backward - c.weight;
}

constexpr ScheduleTraits kTraits[] = {
    {ScheduleKind::kGpipe, "gpipe", false, false, gpipe, full_bubble},
    {ScheduleKind::k1F1B, "1f1b", false, false, one_f_one_b, full_bubble},
    {ScheduleKind::kInterleaved1F1B, "interleaved", true, false, one_f_one_b,
     full_bubble},
    {ScheduleKind::kZbH1, "zb-h1", false, true, zb_h1, zb_h1_bubble}};

std::string op_name(const Schedule& s, const PipeOp& op) {
  const char letter = op.pass == Pass::kForward    ? 'F'
                      : op.pass == Pass::kBackward ? 'B'
                                                   : 'W';
  return s.chunks == 1
             ? fmt::format("{}{}", letter, op.microbatch)
             : fmt::format("{}{}.{}", letter, op.microbatch, op.chunk);
}

Status check_complete(const Schedule& s) {
  if (static_cast<int>(s.ranks.size()) != s.pp)
    return invalid_argument(
        fmt::format("schedule: {} lists for {} ranks", s.ranks.size(), s.pp));
  const int passes = s.split_backward ? 3 : 2;
  for (int r = 0; r < s.pp; ++r) {
    const auto& ops = s.ranks[static_cast<size_t>(r)];
    std::vector<bool> seen(static_cast<size_t>(passes) *
                           static_cast<size_t>(s.num_microbatches) *
                           static_cast<size_t>(s.chunks));
    for (const PipeOp& op : ops) {
      if (static_cast<int>(op.pass) >= passes || op.microbatch < 0 ||
          op.microbatch >= s.num_microbatches || op.chunk < 0 ||
          op.chunk >= s.chunks)
        return invalid_argument(fmt::format(
            "schedule: rank {}: {} is out of range", r, op_name(s, op)));
      const int id =
          (static_cast<int>(op.pass) * s.num_microbatches + op.microbatch) *
              s.chunks +
          op.chunk;
      if (seen[static_cast<size_t>(id)])
        return invalid_argument(
            fmt::format("schedule: rank {}: {} twice", r, op_name(s, op)));
      seen[id] = true;
    }
    if (ops.size() != seen.size())
      return invalid_argument(fmt::format("schedule: rank {}: {} ops, needs {}",
                                          r, ops.size(), seen.size()));
  }
  return ok_status();
}

// The state of a simulation.
class Simulation {
 public:
  Simulation(const Schedule& s, const PassLength& length, double transfer)
      : s_(s), length_(length), transfer_(transfer) {
    const auto cells = static_cast<size_t>(s.num_stages()) *
                       static_cast<size_t>(s.num_microbatches);
    for (auto& done : done_) done.assign(cells, -1);
    const auto n = static_cast<size_t>(s.pp);
    next_.assign(n, 0);
    free_at_.assign(n, 0);
    timing_.busy.assign(n, 0);
  }

  Result<PipeTiming> run() {
    // Times depend only on the lists' order and the inputs, so the order in
    // which ranks are visited does not matter.
    for (bool moved = true; moved;) {
      moved = false;
      for (int r = 0; r < s_.pp; ++r)
        while (try_next(r)) moved = true;
    }
    for (int r = 0; r < s_.pp; ++r) {
      const auto& ops = s_.ranks[static_cast<size_t>(r)];
      const size_t at = next_[static_cast<size_t>(r)];
      if (at < ops.size())
        return invalid_argument(fmt::format(
            "schedule: deadlock: rank {} waits forever at {} (op {} of {})", r,
            op_name(s_, ops[at]), at, ops.size()));
    }
    double work = 0;
    for (size_t r = 0; r < free_at_.size(); ++r) {
      timing_.makespan = std::max(timing_.makespan, free_at_[r]);
      work += timing_.busy[r];
    }
    if (timing_.makespan > 0)
      timing_.bubble_share = 1 - work / (s_.pp * timing_.makespan);
    return timing_;
  }

 private:
  double& done(Pass pass, int stage, int microbatch) {
    const int i = stage * s_.num_microbatches + microbatch;
    return done_[static_cast<size_t>(pass)][static_cast<size_t>(i)];
  }
  // When the result of a pass on another stage arrives; nullopt if unknown.
  std::optional<double> arrival(Pass pass, int stage, int microbatch) {
    const double at = done(pass, stage, microbatch);
    if (at < 0) return std::nullopt;
    return at + (s_.pp > 1 ? transfer_ : 0);
  }
  std::optional<double> inputs_at(const PipeOp& op, int stage) {
    const int m = op.microbatch;
    if (op.pass == Pass::kForward)
      return stage == 0 ? 0 : arrival(Pass::kForward, stage - 1, m);
    const Pass mine =
        op.pass == Pass::kBackward ? Pass::kForward : Pass::kBackward;
    if (done(mine, stage, m) < 0) return std::nullopt;
    if (op.pass == Pass::kWeight || stage == s_.num_stages() - 1) return 0;
    return arrival(Pass::kBackward, stage + 1, m);
  }

  bool try_next(int rank) {
    const auto r = static_cast<size_t>(rank);
    if (next_[r] == s_.ranks[r].size()) return false;
    const PipeOp& op = s_.ranks[r][next_[r]];
    const int stage = s_.stage(rank, op.chunk);
    const auto ready = inputs_at(op, stage);
    if (!ready) return false;
    const double cost = length_(rank, next_[r]);
    free_at_[r] = std::max(free_at_[r], *ready) + cost;
    timing_.busy[r] += cost;
    done(op.pass, stage, op.microbatch) = free_at_[r];
    ++next_[r];
    return true;
  }

  const Schedule& s_;
  const PassLength& length_;
  const double transfer_;
  std::vector<double> done_[3];  // by pass: end time by (stage, microbatch)
  std::vector<size_t> next_;     // by rank
  std::vector<double> free_at_;
  PipeTiming timing_;
};

}  // namespace

const ScheduleTraits& traits_of(ScheduleKind kind) {
  for (const ScheduleTraits& t : kTraits)
    if (t.kind == kind) return t;
  CHECK_MSG(false, "a schedule without traits");
  return kTraits[0];
}

Result<ScheduleKind> parse_schedule(std::string_view name) {
  std::vector<std::string> names;
  for (const ScheduleTraits& t : kTraits) {
    if (name == t.name) return t.kind;
    names.emplace_back(t.name);
  }
  return invalid_argument(
      fmt::format("schedule '{}': must be one of {}", name, join(names)));
}

std::string Schedule::to_string(int rank) const {
  std::vector<std::string> words;
  for (const PipeOp& op : ranks.at(static_cast<size_t>(rank)))
    words.push_back(op_name(*this, op));
  return join(words, " ");
}

Result<Schedule> make_schedule(ScheduleKind kind, int pp, int num_microbatches,
                               int chunks) {
  const auto fail = [&](const std::string& why) {
    return invalid_argument(fmt::format(
        "schedule {} of {} stages, {} microbatches, {} chunks per rank: {}",
        schedule_name(kind), pp, num_microbatches, chunks, why));
  };
  if (pp < 1 || num_microbatches < 1 || chunks < 1)
    return fail("each must be at least 1");
  const ScheduleTraits& traits = traits_of(kind);
  if (chunks > 1 && !traits.interleaved)
    return fail("several chunks a rank need the interleaved schedule");
  if (chunks > 1 && num_microbatches % pp != 0)
    return fail("the microbatches must be a multiple of the stages");
  Schedule s{.kind = kind,
             .pp = pp,
             .num_microbatches = num_microbatches,
             .chunks = chunks,
             .split_backward = traits.split_backward};
  s.ranks.resize(static_cast<size_t>(pp));
  traits.fill(s);
  return s;
}

Result<Schedule> step_schedule(ScheduleKind kind, int pp, int chunks,
                               int64_t most) {
  CHECK(most >= 1);
  if (chunks > 1) most = (most + pp - 1) / pp * pp;
  return make_schedule(kind, pp, static_cast<int>(most), chunks);
}

Schedule without_padding(Schedule s, int64_t n) {
  s.num_microbatches =
      static_cast<int>(std::min<int64_t>(n, s.num_microbatches));
  for (auto& ops : s.ranks)
    std::erase_if(ops, [&](const PipeOp& op) {
      return op.microbatch >= s.num_microbatches;
    });
  return s;
}

Schedule forward_schedule(int pp, int chunks, int64_t n) {
  Schedule s = step_schedule(chunks > 1 ? ScheduleKind::kInterleaved1F1B
                                        : ScheduleKind::k1F1B,
                             pp, chunks, std::max<int64_t>(1, n))
                   .value();
  for (auto& ops : s.ranks)
    std::erase_if(ops,
                  [](const PipeOp& op) { return op.pass != Pass::kForward; });
  return s;
}

std::vector<int> slots_needed(const Schedule& schedule, int rank) {
  std::vector<int> live(static_cast<size_t>(schedule.chunks), 0);
  std::vector<int> most(live.size(), 1);
  for (const PipeOp& op : schedule.ranks[static_cast<size_t>(rank)]) {
    const auto c = static_cast<size_t>(op.chunk);
    if (op.pass == Pass::kForward) most[c] = std::max(most[c], ++live[c]);
    if (op.pass == schedule.last_pass()) --live[c];
  }
  return most;
}

double pass_cost(const Schedule& schedule, const PassCosts& costs, Pass pass) {
  if (pass == Pass::kForward) return costs.forward;
  if (pass == Pass::kWeight) return costs.weight;
  return costs.backward + (schedule.split_backward ? 0 : costs.weight);
}

Result<PipeTiming> simulate(const Schedule& schedule, const PassCosts& costs) {
  CHECK(costs.forward >= 0 && costs.backward >= 0 && costs.weight >= 0 &&
        costs.transfer >= 0);
  return replay(
      schedule,
      [&](int rank, size_t n) {
        return pass_cost(schedule, costs,
                         schedule.ranks[static_cast<size_t>(rank)][n].pass);
      },
      costs.transfer);
}

Result<PipeTiming> replay(const Schedule& schedule, const PassLength& length,
                          double transfer) {
  RETURN_IF_ERROR(check_complete(schedule));
  return Simulation(schedule, length, transfer).run();
}

Result<std::vector<int64_t>> split_layers(int64_t n_layers, int stages,
                                          const LayerCosts& costs) {
  if (stages < 1 || n_layers < stages)
    return invalid_argument(
        fmt::format("{} pipeline stages for {} layers: a stage needs a layer; "
                    "allowed: 1 to {}",
                    stages, n_layers, n_layers));
  // The stages between the first and the last have loads that differ by at
  // most one. Of equal splits, the one whose later stages have more blocks.
  const int64_t between = std::max(0, stages - 2);
  int64_t first = n_layers, last = 0;
  double least = std::numeric_limits<double>::infinity(), evenness = least;
  // An upper bound: an even split with the remainder on the last stage.
  const int64_t even = n_layers / stages + n_layers % stages;
  if (between > 0)
    least = static_cast<double>(even) + costs.embedding + costs.head;
  for (int64_t b = stages > 1 ? n_layers - stages + 1 : 0;
       b >= std::min(1, stages - 1); --b) {
    // With two stages or one, the first has what the last has not.
    const int64_t most = n_layers - b - between;
    const double y = stages > 1 ? static_cast<double>(b) + costs.head : 0;
    if (y > least) continue;
    for (int64_t a = between > 0 ? 1 : most; a <= most; ++a) {
      const int64_t rest = n_layers - a - b;
      const int64_t low = between > 0 ? rest / between : 0;
      const int64_t more = between > 0 ? rest % between : 0;
      const double x = static_cast<double>(a) + costs.embedding +
                       (stages == 1 ? costs.head : 0);
      if (x > least) break;
      const double largest =
          std::max({x, y, static_cast<double>(low + (more > 0 ? 1 : 0))});
      const double squares = x * x +
                             static_cast<double>((between - more) * low * low +
                                                 more * (low + 1) * (low + 1)) +
                             y * y;
      if (std::tie(largest, squares) >= std::tie(least, evenness)) continue;
      std::tie(least, evenness, first, last) = std::tie(largest, squares, a, b);
    }
  }
  std::vector<int64_t> bounds = {0, first};
  const int64_t rest = n_layers - first - last;
  for (int64_t s = 0; s < between; ++s)
    bounds.push_back(bounds.back() + rest / between +
                     (s >= between - rest % between ? 1 : 0));
  if (stages > 1) bounds.push_back(n_layers);
  return bounds;
}

}  // namespace remesh::geometry
