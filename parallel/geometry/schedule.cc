#include "parallel/geometry/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "proto/base/text.h"

namespace remesh::geometry {
namespace {

constexpr ScheduleKind kKinds[] = {ScheduleKind::kGpipe, ScheduleKind::k1F1B,
                                   ScheduleKind::kInterleaved1F1B,
                                   ScheduleKind::kZbH1};

void gpipe(Schedule& s) {
  for (auto& ops : s.ranks) {
    for (int m = 0; m < s.num_microbatches; ++m)
      ops.push_back({Pass::kForward, m, 0});
    for (int m = 0; m < s.num_microbatches; ++m)
      ops.push_back({Pass::kBackward, m, 0});
  }
}

// Warm-up forwards, then alternating forward and backward, then the remaining
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

// ZB-H1: the order of 1F1B, with the weight gradients of rank r deferred by r
// microbatches. So the last ranks send input gradients immediately, and the
// deferred work fills their bubble at the end; each rank holds at most pp
// microbatches, like the first rank of 1F1B.
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
      const auto id = static_cast<size_t>(
          (static_cast<int>(op.pass) * s.num_microbatches + op.microbatch) *
              s.chunks +
          op.chunk);
      if (seen[id])
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

// The state of a simulated run.
class Simulation {
 public:
  Simulation(const Schedule& s, const PassCosts& c) : s_(s), costs_(c) {
    const auto cells = static_cast<size_t>(s.num_stages()) *
                       static_cast<size_t>(s.num_microbatches);
    for (auto& done : done_) done.assign(cells, -1);
    const auto n = static_cast<size_t>(s.pp);
    next_.assign(n, 0);
    free_at_.assign(n, 0);
    live_.assign(n, 0);
    timing_.busy.assign(n, 0);
    timing_.peak_live.assign(n, 0);
  }

  Result<PipeTiming> run() {
    // Times follow only from the order of the lists and the inputs, so the
    // order in which ranks are visited does not matter.
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
    double most = 0;
    for (size_t r = 0; r < free_at_.size(); ++r) {
      timing_.makespan = std::max(timing_.makespan, free_at_[r]);
      work += timing_.busy[r];
      most = std::max(most, timing_.busy[r]);
    }
    if (timing_.makespan > 0) {
      timing_.bubble_share = 1 - work / (s_.pp * timing_.makespan);
      timing_.bubble_overhead = timing_.makespan / most - 1;
    }
    return timing_;
  }

 private:
  double& done(Pass pass, int stage, int microbatch) {
    return done_[static_cast<size_t>(pass)]
                [static_cast<size_t>(stage * s_.num_microbatches + microbatch)];
  }
  // When the result of a pass on another stage arrives; nullopt if unknown.
  std::optional<double> arrival(Pass pass, int stage, int microbatch) {
    const double at = done(pass, stage, microbatch);
    if (at < 0) return std::nullopt;
    return at + (s_.pp > 1 ? costs_.transfer : 0);
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
    double cost = costs_.forward;
    if (op.pass == Pass::kWeight) cost = costs_.weight;
    if (op.pass == Pass::kBackward)
      cost = costs_.backward + (s_.split_backward ? 0 : costs_.weight);
    free_at_[r] = std::max(free_at_[r], *ready) + cost;
    timing_.busy[r] += cost;
    done(op.pass, stage, op.microbatch) = free_at_[r];
    const Pass last = s_.split_backward ? Pass::kWeight : Pass::kBackward;
    if (op.pass == Pass::kForward)
      timing_.peak_live[r] = std::max(timing_.peak_live[r], ++live_[r]);
    if (op.pass == last) --live_[r];
    ++next_[r];
    return true;
  }

  const Schedule& s_;
  const PassCosts costs_;
  std::vector<double> done_[3];  // by pass: end time by (stage, microbatch)
  std::vector<size_t> next_;     // by rank
  std::vector<double> free_at_;
  std::vector<int> live_;
  PipeTiming timing_;
};

}  // namespace

const char* schedule_name(ScheduleKind kind) {
  switch (kind) {
    case ScheduleKind::kGpipe:
      return "gpipe";
    case ScheduleKind::k1F1B:
      return "1f1b";
    case ScheduleKind::kInterleaved1F1B:
      return "interleaved";
    case ScheduleKind::kZbH1:
      return "zb-h1";
  }
  return "?";
}

Result<ScheduleKind> parse_schedule(std::string_view name) {
  std::vector<std::string> names;
  for (const ScheduleKind kind : kKinds) {
    if (name == schedule_name(kind)) return kind;
    names.emplace_back(schedule_name(kind));
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
  if (chunks > 1 && kind != ScheduleKind::kInterleaved1F1B)
    return fail("several chunks per rank need the interleaved schedule");
  if (chunks > 1 && num_microbatches % pp != 0)
    return fail("the microbatches must be a multiple of the stages");
  Schedule s{.kind = kind,
             .pp = pp,
             .num_microbatches = num_microbatches,
             .chunks = chunks,
             .split_backward = kind == ScheduleKind::kZbH1};
  s.ranks.resize(static_cast<size_t>(pp));
  if (kind == ScheduleKind::kGpipe)
    gpipe(s);
  else if (kind == ScheduleKind::kZbH1)
    zb_h1(s);
  else
    one_f_one_b(s);
  return s;
}

Result<PipeTiming> simulate(const Schedule& schedule, const PassCosts& costs) {
  CHECK(costs.forward >= 0 && costs.backward >= 0 && costs.weight >= 0 &&
        costs.transfer >= 0);
  RETURN_IF_ERROR(check_complete(schedule));
  return Simulation(schedule, costs).run();
}

Result<std::vector<int64_t>> split_layers(int64_t n_layers, int stages,
                                          const LayerCosts& costs) {
  if (stages < 1 || n_layers < stages)
    return invalid_argument(
        fmt::format("{} pipeline stages for {} layers: a stage needs a layer; "
                    "allowed: 1 to {}",
                    stages, n_layers, n_layers));
  const auto n = static_cast<size_t>(n_layers);
  const auto p = static_cast<size_t>(stages);
  const auto load = [&](size_t stage, size_t layers) {
    return static_cast<double>(layers) + (stage == 0 ? costs.embedding : 0) +
           (stage + 1 == p ? costs.head : 0);
  };
  constexpr double kInf = std::numeric_limits<double>::infinity();
  // best[s][k]: least achievable by stages 0..s over the first k layers, of
  // the largest load (first pass), then of the sum of squares among splits
  // whose largest load is that (second pass).
  double limit = kInf;
  std::vector<std::vector<double>> best;
  std::vector<std::vector<size_t>> from;
  for (int pass = 0; pass < 2; ++pass) {
    best.assign(p + 1, std::vector<double>(n + 1, kInf));
    from.assign(p + 1, std::vector<size_t>(n + 1, 0));
    best[0][0] = 0;
    for (size_t s = 0; s < p; ++s)
      for (size_t k = s + 1; k + (p - s - 1) <= n; ++k)
        for (size_t j = s; j < k; ++j) {
          const double x = load(s, k - j);
          if (best[s][j] == kInf || x > limit) continue;
          const double y =
              pass == 0 ? std::max(best[s][j], x) : best[s][j] + x * x;
          if (y < best[s + 1][k]) {
            best[s + 1][k] = y;
            from[s + 1][k] = j;
          }
        }
    limit = pass == 0 ? best[p][n] : limit;
  }
  std::vector<int64_t> bounds(p + 1);
  size_t k = n;
  for (size_t s = p + 1; s-- > 0;) {
    bounds[s] = static_cast<int64_t>(k);
    k = from[s][k];
  }
  return bounds;
}

}  // namespace remesh::geometry
