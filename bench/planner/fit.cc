#include "bench/planner/fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace remesh::bench {
namespace {

// What is expected before any run is seen, and how far (relative standard
// deviation) devices and programs are from it: cuBLAS reaches 0.87 (A100) and
// 0.80 (H100) of the peak alone and less among other work; NCCL 0.73 of a NIC.
struct Prior {
  const char* key;
  double expected, deviation, least, most;
};
constexpr Prior kPriors[] = {{"gemm", 0.75, 0.3, 0.2, 0.95},
                             {"gemm_fp8", 0.6, 0.3, 0.1, 0.95},
                             {"attention", 0.45, 0.3, 0.05, 0.9},
                             {"tuned_attention", 0.5, 0.2, 0.05, 0.9},
                             {"memory", 0.8, 0.1, 0.2, 0.95},
                             {"node", 0.8, 0.2, 0.1, 0.95},
                             {"network", 0.73, 0.2, 0.1, 0.95},
                             {"launch_us", 12, 0.5, 1, 100},
                             {"straggle", 0.01, 0.5, 0.001, 0.1}};
constexpr size_t kConstants = std::size(kPriors);
constexpr double kPriorWeight = 0.2;
constexpr double kSmallest = 0.02;  // residuals below count as squares

using Constants = std::vector<double>;  // logarithms

Constants expected() {
  Constants out;
  for (const Prior& p : kPriors) out.push_back(std::log(p.expected));
  return out;
}

void set_constants(const Constants& c, pb::Efficiency* e) {
  for (size_t i = 0; i < kConstants; ++i)
    e->GetReflection()->SetDouble(
        e, e->GetDescriptor()->FindFieldByName(kPriors[i].key), std::exp(c[i]));
}

// To three digits: more say nothing.
void round_constants(pb::Efficiency* e) {
  for (const Prior& p : kPriors) {
    const auto* field = e->GetDescriptor()->FindFieldByName(p.key);
    const double x = e->GetReflection()->GetDouble(*e, field);
    e->GetReflection()->SetDouble(e, field,
                                  std::stod(fmt::format("{:.3g}", x)));
  }
}

// One set of constants for the samples' clusters.
class Fit {
 public:
  // The constants are expected to be near `center`; `narrow`: times their usual
  // deviation.
  Fit(const std::vector<ClusterFile>& clusters, std::vector<Sample> samples,
      Constants center, double narrow)
      : samples_(std::move(samples)),
        center_(std::move(center)),
        narrow_(narrow) {
    for (const ClusterFile& c : clusters) clusters_.push_back(c.cluster);
  }

  // Gauss-Newton steps on reweighted squares (Marquardt's damping).
  Constants run() {
    Constants at = center_;
    if (samples_.empty()) return at;
    std::vector<double> r = residuals(at);
    double now = loss(at, r), damping = 1e-3;
    for (int step = 0; step < 40 && damping < 1e6; ++step) {
      const auto [gradient, curvature] = derivatives(at, r);
      bool better = false;
      while (!better && damping < 1e6) {
        Constants next = solve(at, gradient, curvature, damping);
        std::vector<double> there = residuals(next);
        const double then = loss(next, there);
        better = then < now - 1e-5;
        damping *= better ? 0.3 : 5;
        if (better) {
          at = std::move(next);
          r = std::move(there);
          now = then;
        }
      }
    }
    return at;
  }

 private:
  static double clamp(size_t i, double x) {
    return std::clamp(x, std::log(kPriors[i].least), std::log(kPriors[i].most));
  }
  double deviation(size_t i) const { return kPriors[i].deviation * narrow_; }
  double pull(size_t i, double x) const {
    return (x - center_[i]) / deviation(i);
  }

  std::vector<double> residuals(const Constants& at) {
    std::vector<planner::Machine> machines;
    for (pb::Cluster& c : clusters_) {
      set_constants(at, c.mutable_efficiency());
      machines.push_back(planner::machine_of(c));
    }
    std::vector<double> out;
    for (const Sample& s : samples_)
      out.push_back(std::log(predict(machines[s.cluster], *s.row).tokens_per_s /
                             s.row->tokens_per_s));
    return out;
  }

  double loss(const Constants& at, const std::vector<double>& r) const {
    double sum = 0;
    for (size_t i = 0; i < r.size(); ++i) {
      const double x = std::fabs(r[i]);
      sum += samples_[i].weight *
             (x > kSmallest ? x : (x * x / kSmallest + kSmallest) / 2);
    }
    for (size_t i = 0; i < kConstants; ++i)
      sum += kPriorWeight * pull(i, at[i]) * pull(i, at[i]) / 2;
    return sum;
  }

  using Matrix = std::vector<std::vector<double>>;
  std::pair<Constants, Matrix> derivatives(const Constants& at,
                                           const std::vector<double>& r) {
    constexpr double kStep = 0.02;
    std::vector<std::vector<double>> slope;
    for (size_t i = 0; i < kConstants; ++i) {
      Constants moved = at;
      moved[i] += kStep;
      slope.push_back(residuals(moved));
      for (size_t k = 0; k < r.size(); ++k)
        slope[i][k] = (slope[i][k] - r[k]) / kStep;
    }
    Constants gradient(kConstants);
    Matrix curvature(kConstants, Constants(kConstants));
    for (size_t i = 0; i < kConstants; ++i) {
      const double s = deviation(i);
      gradient[i] = kPriorWeight * pull(i, at[i]) / s;
      curvature[i][i] = kPriorWeight / (s * s);
      for (size_t k = 0; k < r.size(); ++k) {
        const double w =
            samples_[k].weight / std::max(std::fabs(r[k]), kSmallest);
        gradient[i] += w * r[k] * slope[i][k];
        for (size_t j = 0; j < kConstants; ++j)
          curvature[i][j] += w * slope[i][k] * slope[j][k];
      }
    }
    return {gradient, curvature};
  }

  // at - (curvature + damping diagonal)^-1 gradient, by elimination: the matrix
  // is positive definite.
  static Constants solve(const Constants& at, Constants b, Matrix a,
                         double damping) {
    for (size_t i = 0; i < kConstants; ++i) a[i][i] *= 1 + damping;
    for (size_t i = 0; i < kConstants; ++i)
      for (size_t j = i + 1; j < kConstants; ++j) {
        const double f = a[j][i] / a[i][i];
        for (size_t k = i; k < kConstants; ++k) a[j][k] -= f * a[i][k];
        b[j] -= f * b[i];
      }
    Constants next = at;
    for (size_t i = kConstants; i-- > 0;) {
      for (size_t k = i + 1; k < kConstants; ++k) b[i] -= a[i][k] * b[k];
      b[i] /= a[i][i];
    }
    for (size_t i = 0; i < kConstants; ++i)
      next[i] = clamp(i, at[i] - std::clamp(b[i], -0.3, 0.3));
    return next;
  }

  std::vector<pb::Cluster> clusters_;
  std::vector<Sample> samples_;
  Constants center_;
  double narrow_;
};

}  // namespace

bool same_chip(const pb::Cluster& a, const pb::Cluster& b) {
  return a.device().peak_tflops() == b.device().peak_tflops() &&
         a.device().cores() == b.device().cores();
}

bool is_measured(const ClusterFile& cluster,
                 const std::vector<ClusterFile>& clusters,
                 const std::vector<Sample>& samples) {
  return std::any_of(samples.begin(), samples.end(), [&](const Sample& s) {
    return same_chip(clusters[s.cluster].cluster, cluster.cluster);
  });
}

std::vector<ClusterFile> fit(const std::vector<ClusterFile>& clusters,
                             const std::vector<Sample>& samples) {
  // First the constants of a chip, in all clusters that have it, then those of
  // each cluster, which are near.
  constexpr double kNearby = 0.7;
  const auto where = [&](const auto& is_mine) {
    std::vector<Sample> out;
    std::copy_if(samples.begin(), samples.end(), std::back_inserter(out),
                 is_mine);
    return out;
  };
  std::vector<ClusterFile> out = clusters;
  for (size_t i = 0; i < clusters.size(); ++i) {
    const Constants chip = Fit(clusters, where([&](const Sample& s) {
                                 return same_chip(clusters[s.cluster].cluster,
                                                  clusters[i].cluster);
                               }),
                               expected(), 1)
                               .run();
    const Constants own =
        Fit(clusters, where([&](const Sample& s) { return s.cluster == i; }),
            chip, kNearby)
            .run();
    set_constants(own, out[i].cluster.mutable_efficiency());
    round_constants(out[i].cluster.mutable_efficiency());
  }
  return out;
}

}  // namespace remesh::bench
