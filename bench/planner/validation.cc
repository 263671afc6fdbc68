#include "bench/planner/validation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace remesh::bench {
namespace {

// Ranks from 0, equal values sharing the mean of theirs.
std::vector<double> ranks(const std::vector<double>& values) {
  std::vector<double> out;
  for (const double v : values) {
    double below = 0, equal = 0;
    for (const double o : values) {
      below += o < v ? 1 : 0;
      equal += o == v ? 1 : 0;
    }
    out.push_back(below + (equal - 1) / 2);
  }
  return out;
}

double correlation(const std::vector<double>& a, const std::vector<double>& b) {
  const auto mean = [](const std::vector<double>& v) {
    return std::accumulate(v.begin(), v.end(), 0.0) /
           static_cast<double>(v.size());
  };
  const double ma = mean(a), mb = mean(b);
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += (a[i] - ma) * (b[i] - mb);
    aa += (a[i] - ma) * (a[i] - ma);
    bb += (b[i] - mb) * (b[i] - mb);
  }
  return aa > 0 && bb > 0 ? ab / std::sqrt(aa * bb) : 0;
}

}  // namespace

double Scored::error() const {
  return std::fabs(predicted / row->tokens_per_s - 1);
}

double mape(const std::vector<Scored>& scored) {
  double sum = 0;
  for (const Scored& s : scored) sum += s.error();
  return sum / static_cast<double>(scored.size());
}

std::vector<Ranking> rankings(const std::vector<Scored>& scored) {
  constexpr size_t kLeast = 5;
  std::map<std::string, std::vector<const Scored*>> groups;
  for (const Scored& s : scored) {
    const Row& r = *s.row;
    const std::string name =
        r.model + " x" + std::to_string(r.world) + " batch " +
        std::to_string(r.global_batch) + " seq " + std::to_string(r.shape.T) +
        (r.run.precision == planner::Precision::kFp8 ? " fp8" : "");
    groups[r.source + "|" + r.device + "|" + name].push_back(&s);
  }
  std::vector<Ranking> out;
  for (const auto& [key, group] : groups) {
    if (group.size() < kLeast) continue;
    std::vector<double> predicted, measured;
    for (const Scored* s : group) {
      predicted.push_back(s->predicted);
      measured.push_back(s->row->tokens_per_s);
    }
    const auto chosen = std::max_element(predicted.begin(), predicted.end()) -
                        predicted.begin();
    const double best = *std::max_element(measured.begin(), measured.end());
    out.push_back({.model = key.substr(key.rfind('|') + 1),
                   .layouts = group.size(),
                   .spearman = correlation(ranks(predicted), ranks(measured)),
                   .regret = 1 - measured[static_cast<size_t>(chosen)] / best});
  }
  return out;
}

Result<std::vector<Sample>> samples_of(const std::vector<ClusterFile>& clusters,
                                       const std::vector<Row>& rows,
                                       Skipped* skipped) {
  // The many short runs of vTrain count as much as so many rows.
  constexpr double kSingleNode = 60;
  const auto single = std::count_if(rows.begin(), rows.end(), [](const Row& r) {
    return r.single_node_vtrain;
  });
  std::vector<Sample> out;
  Status unknown;
  for (const Row& r : rows) {
    const Result<size_t> cluster = cluster_of(clusters, r);
    if (!cluster.ok()) {
      unknown = cluster.status();
      if (skipped != nullptr) ++(*skipped)["gpu " + r.device];
      continue;
    }
    out.push_back({.row = &r,
                   .cluster = *cluster,
                   .weight = r.single_node_vtrain
                                 ? kSingleNode / static_cast<double>(single)
                                 : 1});
  }
  if (out.empty() && !unknown.ok()) return unknown;
  return out;
}

std::vector<Scored> score(const std::vector<ClusterFile>& clusters,
                          const std::vector<Sample>& samples) {
  std::vector<planner::Machine> machines;
  for (const ClusterFile& c : clusters)
    machines.push_back(planner::machine_of(c.cluster));
  std::vector<Scored> out;
  for (const Sample& s : samples)
    out.push_back({s.row, predict(machines[s.cluster], *s.row).tokens_per_s});
  return out;
}

void set_errors(const std::vector<Sample>& samples,
                std::vector<ClusterFile>* clusters) {
  constexpr double kUsual = 0.9, kMost = 0.99;
  constexpr size_t kFew = 20;
  const std::vector<Scored> fitted = score(*clusters, samples);
  const auto usual = [&](const std::vector<Scored>& scored,
                         const auto& counts) {
    std::vector<std::pair<double, double>> errors;  // with their weights
    double all = 0;
    for (size_t i = 0; i < samples.size(); ++i)
      if (counts(samples[i])) {
        errors.emplace_back(scored[i].error(), samples[i].weight);
        all += samples[i].weight;
      }
    std::sort(errors.begin(), errors.end());
    double below = 0;
    for (const auto& [error, weight] : errors) {
      below += weight;
      if (below >= kUsual * all) return std::pair{error, errors.size()};
    }
    return std::pair{0.0, errors.size()};
  };
  const auto any = [](const Sample&) { return true; };
  const double of_any = usual(fitted, any).first;
  const double unfitted = usual(score(fit(*clusters, {}), samples), any).first;
  for (size_t c = 0; c < clusters->size(); ++c) {
    auto [error, n] =
        usual(fitted, [&](const Sample& s) { return s.cluster == c; });
    if (n < kFew) error = std::max(error, of_any);
    if (!is_measured((*clusters)[c], *clusters, samples))
      error = std::max(error, unfitted);
    (*clusters)[c].cluster.mutable_efficiency()->set_error(
        std::min(kMost, std::stod(fmt::format("{:.2g}", error))));
  }
}

}  // namespace remesh::bench
